"""Texts for errors of requests: their form, their keys, their routes."""

from collections.abc import Mapping

from lorry import errors as er
from lorry.error_catalogue.words import RetryPattern, Severity, Words

REQUESTS: Mapping[type[er.LorryError], Words] = {
    er.CallerError: Words(
        patterns=("{}",),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "Never sent by itself: it is the family of all errors that the caller can mend.",
        ),
        situations=("A client catches the whole family at once.",),
        solutions=("See the entry of the code that was sent.",),
        handling="Do not send the same call again; show the message to whoever wrote the call.",
        prevention=("Check calls against GET /openapi.json.",),
        tags=("family", "caller"),
    ),
    er.RequestInvalid: Words(
        patterns=(
            "The call cannot be sent: {}.",
            "{}: {}.",
            "{} is {}",
            "{} has {}",
            "{} names {}",
            "{} cannot be streamed; leave stream out.",
            "{} needs {}",
            "{} must map token ids, written as strings, to numbers.",
            "{} not supported{}",
            "Send either prompt or messages.",
            "This model came without a tokenizer, so {} cannot be used; send prompts as token ids.",
            "This model's maximum context length is {} tokens, but {}",
            "This engine cannot report prompt_logprobs.",
            "Input should be {}",
            "The body {}",
            "The adapter name {} {}.",
            "The adapter's source {} {}",
            "The chat {}",
            "'{}' needs to be provided {}.",
            "Both '{}' and '{}' must be provided.",
            "The lora adapter '{}' {}",
            "Loading lora {} failed: {}",
            "The serialised tensors are damaged: {}",
            "{} prompts with n={} are {} sequences; one request may ask for {}.",
            "{}.",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "A body that is not JSON, or lacks a field, or has one of a wrong type or range.",
            "A prompt that is empty, longer than the model's context, or has a token id beyond "
            "the vocabulary.",
            "A feature the model lacks: text without a tokenizer, chat without a chat template.",
            "An adapter name that cannot be used, or a source that is no path.",
            "An upload that is no form, archive or safetensors file, ends early, or holds links, "
            "bad names or too many files.",
            "A sampling value over the maximum that the adapter's owner has set, or settings of an "
            "adapter that contradict each other.",
        ),
        situations=(
            "A body was sent without Content-Type: application/json.",
            "A chat has grown longer than --max-model-len.",
            "A client sends an option of another server that Lorry does not have.",
            "The chat template of the model or adapter refused the messages.",
            "GET /v1/adapters/{name} shows a maximum that the client does not know of.",
        ),
        solutions=(
            "Mend the field that `param` names, as the message says; `details` lists further ones.",
            "For a long prompt: shorten it, or lower max_tokens to the number in the message.",
        ),
        handling="Do not send it again unchanged. Show `message` and `param` to the author.",
        prevention=(
            "Count tokens with POST /tokenize before sending long prompts.",
            "Generate clients from GET /openapi.json.",
        ),
        tags=("request", "validation", "caller"),
    ),
    er.Unauthorized: Words(
        patterns=("The API key is wrong.", "The request carries no API key."),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=("The server has --api-key, and the request has no such key or a wrong one.",),
        situations=(
            "LORRY_API_KEY is set for the server and not for the client.",
            "A metrics collector or a probe has no key; only GET /health is open without one.",
            "A proxy takes the Authorization header away.",
        ),
        solutions=("Send 'Authorization: Bearer KEY' with the server's --api-key.",),
        handling="Stop, and ask for a key; more tries cannot succeed.",
        prevention=("Keep the key in one secret that server and clients read.",),
        tags=("security", "key", "caller"),
    ),
    er.Forbidden: Words(
        patterns=(
            "{} leads outside the folders that adapters may be loaded from.",
            "The source '{}' is not among those that adapters may be fetched from.",
            "'{}' cannot be fetched. {}",
            "The host '{}' has a private address, which sources are not fetched from.",
            "'{}' redirects to {}://, which is not followed.",
            "Sources are not fetched from sockets.",
            "HF_HUB_OFFLINE is set, so nothing is fetched from the hub.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The source of a load or check lies, with all links followed, outside every "
            "--adapter-root.",
            "A file in the adapter's folder is a link that leads outside.",
            "A remote source is not in --allow-source, or its host, or one that it redirects to, "
            "has a private address that no --private-source names.",
        ),
        situations=(
            "A path was given relative to another working folder than the server's.",
            "The folder of the adapters holds links into a cache elsewhere, as model hubs make.",
            "Somebody tries to read other files of the machine.",
        ),
        solutions=(
            "Copy the adapter, not links to it, below one of the --adapter-root folders.",
            "Start the server with a further --adapter-root for the place where it is.",
            "For a remote source: a further --allow-source, or --private-source for a host of "
            "your own network.",
        ),
        handling="Do not try again; the operator decides what may be read.",
        prevention=("Let trainers write into a folder below an --adapter-root.",),
        tags=("security", "path", "caller"),
    ),
    er.RouteNotFound: Words(
        patterns=("There is no {} here.", "There is no error with the code {}{}"),
        severity=Severity.INFO,
        retry=RetryPattern.NEVER,
        triggers=(
            "The path is none of the server's.",
            "GET /v1/errors/{code} was asked for a code that does not exist.",
        ),
        situations=(
            "A client adds /v1 to a base URL that ends with /v1 already.",
            "A client uses a route of another server.",
        ),
        solutions=("See GET /openapi.json for the routes there are.",),
        handling="Mend the client's URL; do not try again.",
        prevention=("Test clients against GET /version and GET /openapi.json first.",),
        tags=("route", "http", "caller"),
    ),
    er.MethodNotAllowed: Words(
        patterns=("{} does not take {}.",),
        severity=Severity.INFO,
        retry=RetryPattern.NEVER,
        triggers=("The path exists, but not with that HTTP method.",),
        situations=(
            "POST /v1/adapters/{name} was sent where PUT registers an adapter.",
            "A route was opened in a browser, which sends GET.",
        ),
        solutions=("Use one of the methods in the Allow header of the answer.",),
        handling="Mend the client; do not try again.",
        prevention=("Generate clients from GET /openapi.json.",),
        tags=("route", "http", "caller"),
    ),
    er.BodyTooLarge: Words(
        patterns=(
            "The body has {} bytes or more; the server takes {} at most.",
            "The upload has {} bytes or more; the server takes {} at most (--max-upload-bytes).",
            "The upload has {} bytes or more when unpacked, at {}; the server takes {} at most "
            "(--max-upload-bytes).",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=("The body is longer, by its Content-Length or as it arrives, than is taken.",),
        situations=(
            "Many prompts are sent in one request.",
            "Adapter files are sent in the body of a route that takes a path.",
            "An adapter's folder was sent with its optimizer's state.",
        ),
        solutions=(
            "Split the prompts over several requests.",
            "Give the adapter's folder as `source` rather than its files.",
            "Start the server with a higher --max-upload-bytes, or send only the adapter's files.",
        ),
        handling="Split the request; the same body is refused again.",
        prevention=("Send batches of bounded size.",),
        tags=("request", "limit", "caller"),
    ),
    er.OperationNotFound: Words(
        patterns=("There is no operation {}.",),
        severity=Severity.INFO,
        retry=RetryPattern.REREAD,
        triggers=(
            "The id was never given out by this life of the server.",
            "The operation ended, and so many ended after it that it is not remembered any more.",
        ),
        situations=(
            "The server was started again: operations are not kept over a restart.",
            "A client looks for an operation that ended long ago.",
        ),
        solutions=("Ask for the adapter instead: GET /v1/adapters/{name} says what is served.",),
        handling="Read the adapter: what is served tells whether the operation succeeded.",
        prevention=(
            "Follow an operation until its end, or wait for it in the call itself.",
            "Follow GET /v1/events for what happened to adapters.",
        ),
        tags=("operation", "caller"),
    ),
    er.OperationCancelled: Words(
        patterns=("{} of '{}' was cancelled.",),
        severity=Severity.INFO,
        retry=RetryPattern.REREAD,
        triggers=("DELETE /v1/operations/{id} came before the operation had changed anything.",),
        situations=(
            "An operator gave up a load that waited for room.",
            "Two people work on the same adapter.",
        ),
        solutions=("Ask again if it is still wanted; what was served before still is.",),
        handling="Treat it as somebody's decision: do not ask again by yourself.",
        prevention=("Agree on who changes which adapters; labels can say so.",),
        tags=("operation", "adapter", "caller"),
    ),
}
