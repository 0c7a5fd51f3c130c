"""Texts for errors about adapters: their names, their files, the room they need."""

from collections.abc import Mapping

from lorry import errors as er
from lorry.error_catalogue.words import RetryPattern, Severity, Words

ADAPTERS: Mapping[type[er.LorryError], Words] = {
    er.AdapterNotFound: Words(
        patterns=(
            "The model `{}` does not exist. The base model here is `{}`; {}",
            "The adapter '{}' cannot be found.",
            "The adapter '{}' is not loaded on this server.",
            "The lora adapter '{}' cannot be found.",
            "'{}' serves version {}, not {}.",
            "No {} of '{}' is kept on disk.",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "A request's `model`, or the name in an admin call, is not registered.",
            "`name@version` names a version that the name does not stand for (any more).",
            "A rollback finds no earlier version on disk.",
        ),
        situations=(
            "The adapter was unloaded, perhaps a second time.",
            "It has an idle_ttl and nobody had used it for so long; GET /v1/events says so.",
            "The name is misspelt; names are compared letter by letter.",
            "The server runs with another --state than before, so its registry is another.",
            "The adapter was unloaded with purge, which removes what a rollback needs.",
        ),
        solutions=(
            "See GET /v1/models (or lorry ls) for the names there are.",
            "Load the adapter: lorry load NAME PATH, or PUT /v1/adapters/{name}.",
        ),
        handling="Do not try again. An unload that gets it may be taken as done.",
        prevention=(
            "Keep --state on a disk that outlives the server.",
            "Read GET /v1/models at the start of a client.",
        ),
        tags=("adapter", "name", "caller"),
    ),
    er.AdapterUnloading: Words(
        patterns=("The adapter '{}' is being unloaded.",),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "A request came, or still waited, while the adapter was being unloaded: it takes no "
            "new ones while those that run have their time to end.",
        ),
        situations=(
            "Somebody unloads an adapter that clients still use.",
            "A long answer holds up an unload for as long as --drain-timeout.",
        ),
        solutions=(
            "Load the adapter again once the unload has ended, if it is still wanted.",
            "To change its weights without a gap, replace it instead of unloading it.",
        ),
        handling="Treat it as adapter_not_found: the name is going.",
        prevention=(
            "Move clients to another model before the unload.",
            "Replace under the same name (PUT, or lorry load --replace): no request is refused.",
        ),
        tags=("adapter", "unload", "caller"),
    ),
    er.SourceNotFound: Words(
        patterns=(
            "There is no folder {} on the server's machine (asked for as {}).",
            "There is no folder {}.",
            "The folder {} cannot be reached: {}.",
            "The folder {} of adapter {} is gone.",
            "There is no adapter at '{}'.",
            "There is no adapter at '{}': it has no {}.",
            "There is no '{}'.",
            "The hub has no '{}', or it is private and HF_TOKEN does not open it.",
            "'{}' cannot be fetched: HTTP {}.",
            "Loading lora {} failed: No adapter found for {}: {}",
            "The files of '{}' came with a request ({}) and are not kept on the disk any more; "
            "send them again.",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "The adapter's source is no folder that the server can reach.",
            "The adapter came with a request, and its copy on the disk is gone or, with "
            "durable=false, was never written.",
            "A remote source has no adapter_config.json, or does not exist.",
        ),
        situations=(
            "The path is one of the client's machine or of another container.",
            "The trainer has not finished writing, or a volume is not mounted.",
            "A relative path was given; it is read from the server's working folder.",
            "The URI names a file, or a folder above the adapter's.",
        ),
        solutions=(
            "Give the absolute path as the server sees it.",
            "Mount the volume with the adapters into the server's container.",
        ),
        handling="Do not try again until the folder is there; nothing that was served changed.",
        prevention=(
            "Write adapters to a shared folder and rename them into place when complete.",
            "Try the path first: POST /v1/adapters:check.",
        ),
        tags=("adapter", "source", "caller"),
    ),
    er.AdapterConflict: Words(
        patterns=(
            "The adapter '{}' has already been loaded.",
            "The adapter name {} is the name of the base model that is served; {}",
        ),
        severity=Severity.INFO,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "A load that may not replace found the name taken.",
            "The name is one of the served base model's names.",
        ),
        situations=(
            "Two clients load the same name at once; one of them wins.",
            "A start-up script runs a second time, and the registry came back with the server.",
        ),
        solutions=(
            "Take the adapter that is there, if it is the right one: GET /v1/adapters/{name}.",
            "Ask to replace: `replace: true`, `load_inplace: true`, or lorry load --replace.",
            "Choose another name.",
        ),
        handling="Read the adapter; go on as if it had worked if its version is right.",
        prevention=("Let start-up scripts replace: the same version twice is one copy.",),
        tags=("adapter", "name", "caller"),
    ),
    er.VersionMismatch: Words(
        patterns=("{} serves version {}, not {}.", "'{}' serves {}, not {}."),
        severity=Severity.INFO,
        retry=RetryPattern.REREAD,
        triggers=(
            "If-Match (lorry load --if-match) names another version than the one served now.",
        ),
        situations=(
            "Somebody else replaced the adapter meanwhile: the condition did its work.",
            "A publisher remembers a version from before a rollback.",
        ),
        solutions=("Read the adapter again, and decide on its present version.",),
        handling="Read the ETag of GET /v1/adapters/{name}, decide anew, and send that version.",
        prevention=("Let one publisher write each name.",),
        tags=("adapter", "version", "caller"),
    ),
    er.AdapterInvalid: Words(
        patterns=(
            "Adapter {} cannot be served: {}",
            "{} is not a folder; give the folder {}.",
            "{} is not a regular file; put the file itself into the folder.",
            "'{}' cannot be read: {}",
            "'{}' has more than {} bytes, expected at most that many; raise {}.",
            "A file of '{}' has more than {} bytes; shorten it.",
            "{} of '{}' has the SHA-256 {}, expected {} as its host says; {}",
            "The snapshot of '{}' is gone, and {} holds another version now ({}, not {}); {}",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "adapter_config.json is missing, is not JSON, or asks for what is not served (DoRA, "
            "trained biases, modules_to_save and others).",
            "The weights are missing, cut, corrupt, a pickle, not finite, or all zero.",
            "Ranks, shapes or modules fit neither the config nor the base model, or the rank is "
            "above --max-lora-rank.",
            "A file changed while it was read.",
            "A lost snapshot was fetched again, and the source holds another version now.",
        ),
        situations=(
            "The adapter was trained for another base model or another size of it.",
            "A copy broke off, or a trainer was still writing.",
            "The adapter was saved without save_pretrained, or with an extension of PEFT.",
        ),
        solutions=(
            "Mend each thing that `details` lists; every problem is found at once.",
            "Start the server with a higher --max-lora-rank when only the rank is too large.",
            "Copy or save the adapter again when a file is cut or corrupt.",
        ),
        handling="Do not try again with the same files; what was served before still is.",
        prevention=(
            "Run lorry check PATH with the base model in the trainer's pipeline.",
            "Write to a temporary folder and rename it into place.",
        ),
        tags=("adapter", "files", "validation"),
    ),
    er.QueueFull: Words(
        patterns=(
            "{} requests run or wait already.",
            "{} requests are waiting, {} of them for '{}'.",
            "{} operations on '{}' are waiting already.",
            "More than {} unknown names a minute are asked for (--resolver-rate).",
            "{} unknown names are being looked up already.",
            "{} names are learnt (--resolver-names), and all are in use.",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "As many requests wait for adapters as --max-queue or --max-queue-per-adapter allows.",
            "As many requests run as the server follows at once.",
            "Too many admin calls queue for one name.",
            "Requests name more unknown adapters than --resolver-rate lets be looked up.",
        ),
        situations=(
            "A burst of traffic goes to adapters that are not resident.",
            "Clients repeat requests without pauses.",
            "A script changes one adapter again and again without waiting for the answers.",
        ),
        solutions=(
            "Try again after Retry-After, with growing pauses.",
            "Send fewer requests at once, or raise --max-queue and --max-queue-per-adapter.",
            "Hold more adapters: raise --max-cpu-loras and --max-loras.",
        ),
        handling="Wait for Retry-After, then back off with jitter; give up after some tries.",
        prevention=(
            "Bound what a client has under way.",
            "Watch lorry_tickets in GET /metrics, and add servers before it nears the limit.",
        ),
        tags=("capacity", "queue", "retryable"),
    ),
    er.CapacityExhausted: Words(
        patterns=(
            "No room for the adapter '{}' came free within {} s.",
            "'{}' needs {} bytes of host memory; --host-cache-bytes is {}.",
            "Replacing '{}' needs room for the old version and the new one at once. {}",
            "{} of '{}' did not end within {} s; it was {}.",
            "Adapter {} needs {} bytes in the disk cache, but its limit of {} bytes "
            "(--disk-cache-bytes) {}",
            "Uploads under way take {} of {} bytes of memory (--max-upload-bytes), so there is no "
            "room for {} more now.",
            "{} does not fit into memory after {} bytes ({}).",
            "A download of {} bytes does not fit beside those under way ({} bytes) into {}",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "A request waited a minute, or a load waited for --load-timeout, and no version that "
            "may be evicted fell idle and made room.",
            "One version alone is larger than --host-cache-bytes.",
            "Adapters that come with requests would take more memory than --max-upload-bytes.",
            "A replace finds no room for the old version and the new one together.",
            "The disk cache is full of snapshots that are in use.",
            "Downloads under way take all of --download-bytes.",
        ),
        situations=(
            "More adapters are in use at once than fit, each with long answers.",
            "--host-cache-bytes was set with smaller adapters in mind.",
            "The host cache has one place only, and the adapter is replaced.",
        ),
        solutions=(
            "Try again later: the message says whether waiting can help.",
            "Raise --max-cpu-loras, --host-cache-bytes or --disk-cache-bytes, as it says.",
            "Unload or unpin what is not needed.",
            "For a replace: ask for strategy 'drain-first'; requests wait meanwhile.",
        ),
        handling="Back off as Retry-After says; alert a person when it goes on for minutes.",
        prevention=(
            "Ask POST /v1/adapters:check what a load would evict, or whether it would wait.",
            "Size the host cache for the adapters in use within one minute.",
        ),
        tags=("capacity", "memory", "retryable"),
    ),
    er.AllPinned: Words(
        patterns=(
            "No room for '{}': the pinned adapters {} fill it.",
            "Pinning '{}' would pin {} adapters; at most {} may be pinned, {}",
        ),
        severity=Severity.WARNING,
        retry=RetryPattern.AFTER_CHANGE,
        triggers=(
            "Pinned adapters take all room that the version would need.",
            "A pin would leave no slot free for the others.",
        ),
        situations=(
            "Pins were added over time and never taken back.",
            "--max-loras or --max-cpu-loras is small for the number of pins.",
        ),
        solutions=(
            "Unpin or unload one of the adapters that the message names.",
            "Raise --max-loras and --max-cpu-loras.",
        ),
        handling="Do not wait: nothing changes until a person unpins something.",
        prevention=(
            "Pin only what must never wait; the cache keeps what is used anyway.",
            "Keep pins below the smaller of --max-loras and --max-cpu-loras, less one.",
        ),
        tags=("capacity", "pin"),
    ),
    er.AdapterUnavailable: Words(
        patterns=("The adapter '{}' could not be loaded: {} It is tried again in {} s.",),
        severity=Severity.ERROR,
        retry=RetryPattern.BACKOFF,
        triggers=(
            "The adapter is registered, but its last load failed on every engine that is up, and "
            "the pause before the next try is not over.",
        ),
        situations=(
            "Its snapshot was deleted from the disk cache, and its source is gone too.",
            "The engine refused it, or ended while it loaded it.",
        ),
        solutions=(
            "Read the reason in the message and in GET /v1/adapters/{name}.",
            "Load it again from a sound source: lorry load NAME PATH --replace.",
        ),
        handling="Try again after Retry-After, which is when the next load is due.",
        prevention=(
            "Keep sources, or a disk cache that is large enough for all registered adapters.",
            "Watch the failed loads in GET /metrics.",
        ),
        tags=("adapter", "engine", "retryable"),
    ),
}
