"""A simulation that never gets somewhere says nothing about it: what the smoke seeds must reach."""

import typing
from dataclasses import fields

import pytest

from lorry.lifecycle import commands as cm
from tests.simulation.shell.options import Faults
from tests.simulation.shell.smoke import all_reached

pytestmark = pytest.mark.timeout(180)
"""The first test of the file may run all smoke seeds."""

ROUTES = {
    *("put", "patch", "delete", "rollback", "prefetch", "check", "diff", "cancel"),
    *("adapters", "adapter", "operations", "operation", "events", "replicas", "models"),
    *("vllm load", "vllm load in place", "vllm unload", "sglang load", "sglang unload"),
    *("sagemaker load", "sagemaker unload", "mistral list", "ping", "loads", "health generate"),
    *("completion", "completion stream", "chat", "chat stream", "generate", "generate stream"),
    *("invocations completion", "invocations completion stream", "metrics", "health"),
    *("bad json", "bad value", "bad method", "bad route", "bad name"),
}  # fmt: skip

ENDS = {
    *("left", "kill", "stop", "infer 200", "infer 404", "infer 429", "infer 500", "infer 503"),
    *("load 200", "load 201", "load 202", "load 400", "load 409", "load 422", "load 500"),
    *("load 503", "load 504", "unload 200", "unload 202", "unload 404", "unload 500"),
    *("change 200", "change 404", "change 409", "rollback 200", "look 200"),
}
"""Kinds of exchanges and how they ended."""


def test_every_kind_of_fault_happens() -> None:
    assert not {field.name for field in fields(Faults)} - all_reached().faults


def test_every_sort_of_call_is_made() -> None:
    assert not ROUTES - all_reached().routes


def test_the_core_gives_every_command() -> None:
    assert not {kind.__name__ for kind in typing.get_args(cm.Command)} - all_reached().commands


def test_exchanges_end_in_every_way() -> None:
    assert not ENDS - all_reached().ends


def test_streams_are_broken_off_by_errors_of_engines_and_of_the_server() -> None:
    found = all_reached().ends
    assert {
        "stream engine_rejected",
        "stream engine_unreachable",
        "stream request_aborted",
    } <= found


def test_promise_2_is_judged_by_the_tokens_of_every_route() -> None:
    routes = {name for name in ROUTES if name.split()[0] in ("completion", "chat", "generate")}
    assert not {f"tokens of {name}" for name in routes} - all_reached().ends
