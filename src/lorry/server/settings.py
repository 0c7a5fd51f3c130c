"""What the HTTP server can be told, as one frozen value."""

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the HTTP side."""

    served_model_names: tuple[str, ...]
    """Names of the base model; the first is used in answers. At least one."""
    model_root: str = ""
    """Where the base model lies, for `root` in /v1/models; "" says its name."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens every route; none given: all routes are open."""
    max_body_bytes: int = 64 * MIB
    """A longer request is refused with 413. A million token ids written out are about 6 MB."""
    max_upload_bytes: int = 1024 * MIB
    """The same for uploads of adapters, and for their files once unpacked; also the memory that all
    uploads under way take together."""
    request_timeout_s: float = 600.0
    """Longest life of an inference request, waiting included."""
    max_sequences_per_request: int = 1024
    """Prompts times `n`: what one request may put into the queue at once."""
    heartbeat_s: float = 15.0
    """A stream that has been silent for so long gets a comment line, so that proxies keep it
    open."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on once the server has been told to stop."""

    @property
    def base_name(self) -> str:
        """The base model's name in answers."""
        return self.served_model_names[0]
