"""Texts for errors of the server's own side: base model, room in general, engine, disk, bugs."""

from collections.abc import Mapping

from lorry import errors as er
from lorry.error_catalogue.clients import CLIENTS
from lorry.error_catalogue.words import RetryPattern, Severity, Words

SERVER: Mapping[type[er.LorryError], Words] = {
    er.LorryError: Words(
        patterns=("The server failed on this request; its log has the cause at {}.",),
        severity=Severity.CRITICAL,
        retry=RetryPattern.NEVER,
        triggers=("Something failed that Lorry has no error for: a bug of ours.",),
        situations=("A request met code that nobody had tried like this.",),
        solutions=(
            "Find the request id of the message in the server's log, and report what stands there.",
        ),
        handling="Give this request up, and keep the id from its X-Request-Id header.",
        prevention=("Keep the server's log; report each of these once.",),
        tags=("bug", "server"),
    ),
    er.ModelUnsupported: Words(
        patterns=(
            "The model's architecture is {}; the embedded engine computes {}.",
            "The weights are quantised ({}); {}",
            "{} is {} in config.json; {}",
            "{} is {} in config.json: {}",
            "layer_types in config.json names {}; only 'full_attention' is computed.",
            "rope type {} in config.json is not computed; known are {}.",
            "{}: {}",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The base model's config.json or GGUF header asks for what the embedded engine does "
            "not compute; found before any weight is read.",
        ),
        situations=(
            "The server is started with a model of a family that is not served.",
            "The model's files are quantised in another form than GGUF.",
            "lorry check was given such a base model.",
        ),
        solutions=(
            "Serve a model of a supported family; the message lists them.",
            "Take the unquantised files of the model, or a GGUF.",
        ),
        handling="The server does not start; a supervisor need not start it again.",
        prevention=("Try a new base model with lorry check before you roll it out.",),
        tags=("model", "start"),
    ),
    er.ModelInvalid: Words(
        patterns=(
            "{}: {}",
            "max_model_len is {}, but {} computes rightly up to {} tokens only; {}",
            "One sequence of {} tokens needs {} bytes of KV, but there are {}; {}",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "A file of the base model is missing, cut, or contradicts another.",
            "--max-model-len is longer than the model computes, or than the KV memory holds.",
        ),
        situations=(
            "A download of the model broke off.",
            "MODEL is a folder with several GGUF files, or with none.",
            "--kv-cache-bytes is small for the context that was asked for.",
        ),
        solutions=(
            "Fetch or convert the model again; the message names the file.",
            "Lower --max-model-len, or raise --kv-cache-bytes.",
        ),
        handling="The server does not start; mend the model or the setting first.",
        prevention=("Compare checksums after a download.",),
        tags=("model", "start"),
    ),
    er.Busy: Words(
        patterns=("{}",),
        severity=Severity.WARNING,
        retry=RetryPattern.BACKOFF,
        triggers=("Never sent by itself: it is the family of errors for want of room.",),
        situations=("A client catches the whole family at once.",),
        solutions=("See the entry of the code that was sent.",),
        handling="Back off as Retry-After says, if the code that was sent is retryable.",
        prevention=("Size queues and caches for the traffic there is.",),
        tags=("family", "capacity"),
    ),
    er.RequestAborted: Words(
        patterns=(
            "The adapter '{}' was unloaded before this request ended.",
            "The request ran longer than the limit of {} s.",
            "The request was ended after {} s, the server's --request-timeout.",
            "The engine ended the request {}.",
            "The load of adapter {} was cancelled; nothing has changed.",
            "The load was ended before its files were read.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.RESEND_ONCE,
        triggers=(
            "An unload's drain time was over while the request ran.",
            "The request took longer than --request-timeout, waiting included.",
            "The engine ended the request by itself.",
        ),
        situations=(
            "An adapter is unloaded with a drain time of 0.",
            "A very long answer runs on a slow machine.",
        ),
        solutions=(
            "Send the request again if its adapter is still listed in GET /v1/models.",
            "Ask for fewer tokens, or raise --request-timeout.",
            "Unload with a longer drain time.",
        ),
        handling="Throw away what was streamed so far, and send the request again once at most.",
        prevention=(
            "Give unloads a --drain-timeout as long as the longest answer.",
            "Bound max_tokens.",
        ),
        tags=("request", "unload", "timeout"),
    ),
    er.ShuttingDown: Words(
        patterns=(
            "The server is stopping.",
            "The server is stopping and takes no new {}.",
            "The server is stopping; the request was ended before it was done.",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.BACKOFF,
        triggers=("The server was told to stop: it takes nothing new, and ends what runs.",),
        situations=(
            "A new release is rolled out.",
            "The machine or the container is being stopped.",
        ),
        solutions=("Send the request to another server, or again once this one is back.",),
        handling="Try another server at once if there is one; else back off as Retry-After says.",
        prevention=(
            "Take a server out of the load balancer (GET /ready says 503) before it is stopped.",
            "Give it --drain-timeout to end what runs.",
        ),
        tags=("server", "stop", "retryable"),
    ),
    er.StorageFailed: Words(
        patterns=(
            "'{}' cannot be kept on the disk: {}; free space, {}",
            "The state {} {}",
            "The state's database needs a driver that is not installed ({}); install it.",
            "The store is closed; open it again.",
            "The change cannot be stored: {}.",
            "The registry could not be written: {}",
            "The disk cache {} cannot be used: {}; {}",
            "The snapshot of '{}' is gone.",
            "The copy of {} was not on the disk within {} s, so it was not published.",
            "The copy could not be written: {}",
            "The upload could not be written to the disk cache ({}); free space there.",
            "{} cannot be read: {}",
            "{} cannot be read as JSON: {}",
            "The tokenizer in {} {}",
            "Converting the tokenizer in {} took over {} s.",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The state or the disk cache could not be read or written, or is used by another "
            "server.",
            "A snapshot was deleted behind the server's back.",
            "At the start: the model's tokenizer cannot be read.",
        ),
        situations=(
            "The disk is full, or was mounted for reading only.",
            "Two servers were started with the same --state.",
            "An older release is started on the state of a newer one.",
        ),
        solutions=(
            "Do as the end of the message says: free space, mend permissions, stop the other "
            "server, or choose another --state.",
            "Then ask again: the change was not made, and what was served still is.",
        ),
        handling="Do not repeat the call before an operator has looked; inference goes on.",
        prevention=(
            "Watch the free space of the state's disk.",
            "Give every server its own --state, and back it up.",
        ),
        tags=("storage", "disk", "server"),
    ),
    er.EngineError: Words(
        patterns=("{}",),
        severity=Severity.ERROR,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=("Never sent by itself: it is the family of the engine's errors.",),
        situations=("A client catches the whole family at once.",),
        solutions=("See the entry of the code that was sent.",),
        handling="Do as the entry of the code that was sent says.",
        prevention=("Watch GET /health and GET /v1/replicas.",),
        tags=("family", "engine"),
    ),
    er.EngineRejected: Words(
        patterns=(
            "The engine failed the {}: {}",
            "Engine id {}",
            "Request {}",
            "Host memory holds {}",
            "No room in host memory for {}: {}",
            "The adapter's rank is {}; the engine takes up to {}.",
            "The adapter was packed for {}",
            "The model's logits are not finite numbers.",
            "The engine has been started before; make another one.",
            "A frame of {} bytes; {} is the limit.",
            "{} was removed while it was being loaded.",
            "{} of {} slots are pinned{}",
            "{} needs {} bytes of host memory, but {}",
            "{} has rank {}, but max_lora_rank is {}.",
            "--kernels is {}; this installation and machine have {}.",
            "{} has no adapter_config.json, so {} cannot be loaded.",
            "{}: {}",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The engine answered a load, unload, pin or request with an error of its own.",
            "The engine failed in a way that it has no word for; the message has its words.",
        ),
        situations=(
            "An adapter passes every check and still overflows in the engine's number format.",
            "The base model's weights give results that are not numbers.",
            "The engine and the server disagree about what is held, which the next look settles.",
        ),
        solutions=(
            "Read the engine's words in the message; for a load they name the file.",
            "A refused unload has changed nothing: the adapter is still served. Ask again.",
            "Report it with the server's log when no adapter is at fault.",
        ),
        handling="Do not repeat by yourself; nothing has changed, so a person can decide.",
        prevention=("Run lorry check on adapters before they are loaded.",),
        tags=("engine", "server"),
    ),
    er.EngineUnreachable: Words(
        patterns=(
            "The engine is down: {}.",
            "The engine is down or starting; {}.",
            "The engine is closed.",
            "The engine did not start: {}.",
            "The engine did not come back within {} s.",
            "The engine was lost while {}: {}",
            "The engine dropped the adapter '{}' while the request ran.",
            "{} The engine is down.",
            "No engine came up within {} s: {}",
            "No engine is ready: {}.",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "The engine's process ended; it is started again, and the registry loaded back.",
            "The engine is still starting.",
            "Every engine was down for as long as a request may wait.",
        ),
        situations=(
            "The machine ran out of memory and the engine's process was killed.",
            "A large model is still being read.",
        ),
        solutions=(
            "Try again after Retry-After: the engine is being restarted.",
            "If it stays so, look at GET /v1/replicas and the server's log for the reason.",
        ),
        handling="Back off as Retry-After says. A stream that was cut has to be sent again.",
        prevention=(
            "Leave memory free: lower --kv-cache-bytes, --host-cache-bytes or --max-num-seqs.",
            "Send traffic only while GET /ready is 200.",
        ),
        tags=("engine", "restart", "retryable"),
    ),
    er.EngineTimeout: Words(
        patterns=(
            "The engine did not answer the {} within its deadline.",
            "The engine did not answer {} within {} s.",
            "The adapter '{}' was not loaded within {} s.",
            "{} of '{}' did not end within {} s; it was {}.",
        ),
        severity=Severity.ERROR,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "The engine took longer over a load than --load-timeout, or over another command "
            "than half a minute.",
            "An admin call's time was over while it fetched, loaded or drained.",
        ),
        situations=(
            "The disk is slow, or shared with a trainer.",
            "An unload waits for requests that run longer than its drain time and do not end.",
            "The engine is stuck.",
        ),
        solutions=(
            "Try again: what was begun is undone, and nothing that was served has changed.",
            "Raise --load-timeout when large adapters come from a slow disk.",
            "If it stays so, look at GET /health and GET /v1/replicas.",
        ),
        handling="Back off as Retry-After says, a few times; then alert a person.",
        prevention=("Keep the disk cache on a fast local disk.",),
        tags=("engine", "timeout", "retryable"),
    ),
    er.BrokenInvariant: Words(
        patterns=("Promise {}: {}",),
        severity=Severity.CRITICAL,
        retry=RetryPattern.NEVER,
        triggers=(
            "A check inside Lorry found that one of its promises would be broken, and stopped "
            "rather than break it.",
        ),
        situations=("None that a caller or operator can bring about knowingly: it is a bug.",),
        solutions=(
            "Start the server again: the registry is kept, and adapters are loaded back.",
            "Report the promise's number, the message and the server's log.",
        ),
        handling="Do not try again on this server; use another one, and alert a person.",
        prevention=("Keep the server's log at --log-level info, so that a report is complete.",),
        tags=("bug", "server"),
    ),
    **CLIENTS,
}
