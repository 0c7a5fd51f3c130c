"""Writes a model's tokenizer as `tokenizer.json`, in a process of its own because transformers
brings torch along.

Run as `python -m lorry.tokenizer_export FOLDER DESTINATION [GGUF_NAME]`; `lorry.tokens` does so for
models that carry their tokenizer in another form: GGUF files, sentencepiece models, vocab and
merges.
"""

import sys

from transformers import AutoTokenizer


def export(folder: str, destination: str, gguf_name: str | None = None) -> None:
    """Raises what transformers raises when it cannot read the tokenizer."""
    extra = {"gguf_file": gguf_name} if gguf_name else {}
    AutoTokenizer.from_pretrained(folder, local_files_only=True, **extra).save_pretrained(
        destination
    )


if __name__ == "__main__":
    export(*sys.argv[1:])
