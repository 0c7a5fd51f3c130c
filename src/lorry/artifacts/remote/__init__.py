"""Adapters from elsewhere: from a URI to a folder on this disk, which is then judged like any
other."""
