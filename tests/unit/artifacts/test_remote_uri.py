"""What is taken as a URI, what its parts are, and that no credential is ever shown."""

import ipaddress

import pytest

from lorry.artifacts.remote.policy import AllowedSource, PrivatePlace, SourcePolicy
from lorry.artifacts.remote.uri import is_remote, parse_uri, redact
from lorry.errors import Forbidden, RequestInvalid

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "shown", "host", "path"),
    [
        ("hf://acme/legal", "hf://acme/legal", "acme/legal", ""),
        ("hf://acme/legal@v2/a/b/", "hf://acme/legal@v2/a/b", "acme/legal", "a/b"),
        ("hf://acme/l@refs%2Fpr%2F1", "hf://acme/l@refs%2Fpr%2F1", "acme/l", ""),
        ("s3://bucket", "s3://bucket", "bucket", ""),
        ("S3://bucket/a b/c//", "s3://bucket/a b/c", "bucket", "a b/c"),
        ("gs://my_bucket.eu/x", "gs://my_bucket.eu/x", "my_bucket.eu", "x"),
        ("https://Host.Example:443/a/", "https://host.example/a", "host.example", "a"),
        ("https://h:8443/a?sig=x", "https://h:8443/a", "h:8443", "a"),
        ("https://[2001:db8::1]/a", "https://[2001:db8::1]/a", "[2001:db8::1]", "a"),
    ],
)
def test_a_source_has_parts(source: str, shown: str, host: str, path: str) -> None:
    uri = parse_uri(source)
    assert (str(uri), uri.host, uri.path) == (shown, host, path)
    assert parse_uri(str(uri)).host == uri.host


def test_a_commit_never_changes_and_a_branch_may() -> None:
    uri = parse_uri("hf://acme/legal@main")
    assert not uri.pinned
    assert uri.at(COMMIT).pinned
    assert str(uri.at(COMMIT)) == f"hf://acme/legal@{COMMIT}"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "ftp://h/x",
            "http://h/x",
            "file2://x",
            "s3:///x",
            "s3://B/x",
            "s3://a",
            "s3://1.2.3.4/x",
        ),
        *(
            "s3://user@bucket/x",
            "gs://b/x#1",
            "s3://b/x?versionId=1",
            "gs://b/../c",
            "s3://b/%2e%2e",
        ),
        *("https://", "https:///x", "https://h:port/x", "https://h:99999/x", "https://-h/x"),
        *(
            "https://u:p@h/x",
            "https://h/x#f",
            "https://h/a/../b",
            "https://h/\x00",
            "https://h\\x/a",
        ),
        *("hf://", "hf://acme", "hf://acme/", "hf://acme/a b", "hf://acme/l@", "hf://acme/l@a..b"),
        *("hf://acme/l@a b", "hf://../l", "hf://acme/l/../../x", "https://h/" + "x" * 5000),
    ],
)
def test_what_is_no_source_is_refused(source: str) -> None:
    assert is_remote(source)
    with pytest.raises(RequestInvalid) as caught:
        parse_uri(source)
    assert caught.value.param == "source"


@pytest.mark.parametrize(
    "source", ["/a/b", "a/b", "~/x", "file:///a", "FILE:///a", "c:/x", "a:b", "acme/legal", ""]
)
def test_a_path_is_no_uri(source: str) -> None:
    assert not is_remote(source)
    assert redact(source) == source


@pytest.mark.parametrize(
    "source",
    [
        "https://user:secret@host/x",
        "https://secret@host/x",
        "https://host/x?X-Amz-Signature=secret",
        "https://host/x#secret",
        "https://host?secret",
        "https:/u:secret@host/x",
        "HTTPS://u:secret@ho@st/x",
        "ftp://u:secret@host/x?secret",
        "s3://key:secret@bucket/x",
        "https://host/x\n?secret",
    ],
)
def test_no_credential_is_shown(source: str) -> None:
    assert "secret" not in redact(source)
    try:
        assert "secret" not in str(parse_uri(source))
    except RequestInvalid as error:
        assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("rule", "source", "allowed"),
    [
        ("https://", "https://any.example/x", True),
        ("https://", "s3://bucket/x", False),
        ("https://h.example", "https://h.example/x", True),
        ("https://h.example", "https://h.example.evil/x", False),
        ("https://h.example", "https://h.example:8443/x", False),
        ("https://h.example:8443", "https://h.example:8443/x", True),
        ("https://*.example.com", "https://a.b.example.com/x", True),
        ("https://*.example.com", "https://example.com/x", False),
        ("https://*.example.com", "https://evilexample.com/x", False),
        ("s3://bucket/loras", "s3://bucket/loras/legal", True),
        ("s3://bucket/loras/", "s3://bucket/loras", True),
        ("s3://bucket/loras", "s3://bucket/loras-private/x", False),
        ("s3://bucket/loras", "s3://bucket", False),
        ("hf://acme", "hf://acme/legal@main", True),
        ("hf://acme", "hf://acme2/legal", False),
        ("hf://acme/legal", "hf://acme/legal@v1/sub", True),
        ("hf://acme/legal", "hf://acme/legal2", False),
    ],
)
def test_the_allow_list_goes_by_scheme_host_and_folder(
    rule: str, source: str, allowed: bool
) -> None:
    policy = SourcePolicy(allowed=(AllowedSource.parse(rule),))
    if allowed:
        policy.check(parse_uri(source))
    else:
        with pytest.raises(Forbidden):
            policy.check(parse_uri(source))


def test_an_empty_allow_list_allows_nothing_and_none_allows_all() -> None:
    with pytest.raises(Forbidden):
        SourcePolicy(allowed=()).check(parse_uri("hf://acme/legal"))
    SourcePolicy().check(parse_uri("hf://acme/legal"))


@pytest.mark.parametrize(
    "rule", ["", "bucket", "ftp://h", "http://h", "s3://u@b", "https://h/../x"]
)
def test_a_rule_that_means_nothing_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        AllowedSource.parse(rule)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00::1"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1"),
    ],
)
def test_promise_9_a_private_address_is_known_in_every_guise(address: str) -> None:
    assert not SourcePolicy().may_connect("h", ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_let_through(address: str) -> None:
    assert SourcePolicy().may_connect("h", ipaddress.ip_address(address))


def test_a_private_place_is_a_host_or_a_network() -> None:
    inside = ipaddress.ip_address("10.1.2.3")
    outside = ipaddress.ip_address("10.2.0.1")
    by_network = SourcePolicy(private=(PrivatePlace.parse("10.1.0.0/16"),))
    assert by_network.may_connect("h", inside)
    assert by_network.may_connect("h", ipaddress.ip_address("::ffff:10.1.2.3"))
    assert not by_network.may_connect("h", outside)
    by_name = SourcePolicy(private=(PrivatePlace.parse("Minio.local"),))
    assert by_name.may_connect("minio.local", inside)
    assert not by_name.may_connect("other.local", inside)
    for wrong in ("", "10.0.0.0/33", "http://h", "1.2.3", "h:80"):
        with pytest.raises(ValueError, match="must be a host"):
            PrivatePlace.parse(wrong)
