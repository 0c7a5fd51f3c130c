"""Texts for errors that a server never sends: those of `lorry.Client` and the command line, when no
answer of Lorry's came."""

from collections.abc import Mapping

from lorry import errors as er
from lorry.error_catalogue.words import RetryPattern, Severity, Words

CLIENTS: Mapping[type[er.LorryError], Words] = {
    er.ServerUnreachable: Words(
        patterns=(
            "No server answers at {}.",
            "{} is no usable URL: {}",
            "{} cannot be reached over TLS: {}",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.BACKOFF,
        triggers=("The connection was refused or not made in time, or the URL is none.",),
        situations=(
            "No server was started, or it is still reading its model.",
            "The server listens on another port or host than the client was told.",
            "The URL begins with https:// and the server speaks http, or its certificate is not "
            "one that this machine trusts.",
        ),
        solutions=(
            "Start a server with lorry serve MODEL.",
            "Name the server with --url, with LORRY_URL, or in lorry.Client(URL).",
        ),
        handling="Back off, and give up at a deadline: nothing was asked of a server.",
        prevention=("Send calls only while GET /ready is 200.",),
        tags=("client", "network", "retryable"),
    ),
    er.AnswerLost: Words(
        patterns=(
            "{} did not answer {} in time.",
            "The connection to {} was lost before {} was answered: {}",
            "The server was started again before operation {} had ended.",
            "The feed of events from {} ended.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.REREAD,
        triggers=("The connection broke, or the time was over, after a call had been sent.",),
        situations=(
            "The server or a proxy was stopped while it worked on the call.",
            "A proxy cuts calls that are quiet for a while.",
        ),
        solutions=(
            "Look what is there now, with lorry ls or lorry show: the call may have been done.",
        ),
        handling="Send calls that only read again. Before any other, read the adapter again.",
        prevention=("Give proxies a longer time for idle connections than 15 s.",),
        tags=("client", "network"),
    ),
    er.AnswerInvalid: Words(
        patterns=("{} answered HTTP {} in a form that is not Lorry's.",),
        severity=Severity.WARNING,
        retry=RetryPattern.NEVER,
        triggers=("The answer was not the JSON that Lorry sends.",),
        situations=(
            "Another server runs on that port.",
            "A proxy in front of the server answered with a page of its own.",
        ),
        solutions=("Check host, port and path of the URL; it ends before /v1.",),
        handling="Do not try again; alert a person.",
        prevention=("Give each server a port of its own, and name it with LORRY_URL.",),
        tags=("client", "network"),
    ),
}
