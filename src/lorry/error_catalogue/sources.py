"""Texts for errors about fetching adapters from elsewhere."""

from collections.abc import Mapping

from lorry import errors as er
from lorry.error_catalogue.words import RetryPattern, Severity, Words

SOURCES: Mapping[type[er.LorryError], Words] = {
    er.SourceUnsupported: Words(
        patterns=("Sources of {}:// need the extra '{}', which is not installed: pip install {}",),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=("A source is s3:// or gs://, and what speaks to such a store is not installed.",),
        situations=(
            "Lorry was installed without extras, which keeps it small.",
            "The server's image was built from another list of packages than the test machine's.",
        ),
        solutions=("Run the message's pip command where the server runs, and start it again.",),
        handling="Do not try again before it is installed.",
        prevention=("Install lorry[s3] or lorry[gs] in the image that serves.",),
        tags=("source", "install", "operator"),
    ),
    er.SourceDenied: Words(
        patterns=("'{}' may not be read.", "'{}' may not be read: HTTP {}."),
        severity=Severity.WARNING,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The hub, the store or the web server answered 401 or 403.",
            "A bucket needs credentials, and the server's environment has none.",
        ),
        situations=(
            "HF_TOKEN, the AWS variables or GOOGLE_APPLICATION_CREDENTIALS are missing in the "
            "server's environment, though they are set in the shell of whoever asks.",
            "The role of the machine may list the bucket but not read it.",
            "A repository is gated, and its terms were not accepted with this token.",
            "A signed address has expired.",
        ),
        solutions=(
            "Set the credentials in the environment of the server; docs/sources.md lists where "
            "they are looked for.",
            "Try the same from the server's machine: lorry check URI with the base model.",
        ),
        handling="Do not try again before the credentials are changed.",
        prevention=("Give the server a role of its own that may read what it serves.",),
        tags=("source", "credentials", "operator"),
    ),
    er.SourceUnreachable: Words(
        patterns=(
            "'{}' could not be fetched: {}.",
            "'{}' was not fetched within {} s ({} bytes came).",
            "{} of '{}' did not end within {} s; it was {}.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "The host's name is not known, or it did not answer in four tries.",
            "A transfer broke off, or was slower than --load-timeout allows.",
        ),
        situations=(
            "The server's network has no way out, or only one through a proxy, which is not used.",
            "A store limits the rate of requests.",
            "A large adapter comes over a slow line.",
        ),
        solutions=(
            "Try again: parts that came are kept, and only the rest is fetched.",
            "Raise --load-timeout for large adapters.",
        ),
        handling="Back off as Retry-After says; what was served before still is.",
        prevention=(
            "Keep adapters in a store near the server.",
            "Load before the traffic comes, not with it.",
        ),
        tags=("source", "network", "retryable"),
    ),
    er.DigestMismatch: Words(
        patterns=(
            "{} of '{}' has the SHA-256 {}, expected {}.",
            "'{}' has no {}, whose SHA-256 was to be {}.",
            "'{}' holds version {}, expected {}.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=("The content that was found is not the one that `expected_digest` names.",),
        situations=(
            "Somebody published anew under the same address.",
            "The digest is of another file, or of a version made for another base model.",
        ),
        solutions=(
            "Find out who changed the source, and whether that is wanted.",
            "Read the present version with lorry check, and ask for that one.",
        ),
        handling="Do not try again with the same digest; what was served before still is.",
        prevention=("Publish under addresses that never change: a commit, a folder per release.",),
        tags=("source", "digest", "validation"),
    ),
}
"""By class, as in the other files of this package."""
