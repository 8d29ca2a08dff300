"""Capturing: what arrives, what a copy shares, and what a model that cannot be captured says about its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rewrite import _torch_private as private
from k3rewrite.capture import capture, run_captured
from k3rewrite.capture.dynamo import capture_error
from k3rewrite.errors import CaptureError, ConfigError
from k3rewrite.graph.provenance import (
    UNKNOWN_SOURCE,
    inherit_meta,
    model_lines,
    module_path,
    normalise_module_path,
    source_line,
    trace_source_line,
)

X = torch.randn(3, 4)


def line_of(text: str) -> int:
    """The line of this file that holds `text` (and is not the line that asks)."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip() == text)


# ------------------------------------------------------------------------------------------------ what arrives


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))
        return x * self.weight


def test_a_functional_graph_with_the_writes_at_its_end() -> None:
    captured = capture(Net(), (X,))
    nodes = [n for n in captured.module.graph.nodes if n.op == "call_function"]
    assert [n.target._opname for n in nodes] == ["sum", "add", "mul", "copy_"]
    assert all(isinstance(n.meta["val"], private.FakeTensor) for n in nodes)
    assert len(captured.inputs) == 3 and len(captured.static_inputs) == 2
    assert all(source_line(n).startswith("tests/capture/test_capture.py:") for n in nodes[:3])


def test_nothing_is_run() -> None:
    net = Net()
    captured = capture(net, (X,))
    assert not net.seen.any(), "the buffer is not written while the graph is taken"
    assert captured.module is not None


def test_gradients_are_no_matter_for_a_capture() -> None:
    assert capture(nn.Linear(4, 4), (X,)).module.graph is not None


def test_a_fresh_copy_can_be_changed_alone() -> None:
    captured = capture(Net(), (X,))
    text = captured.module.graph.python_code("self").src
    copy = captured.fresh()
    product = next(n for n in copy.module.graph.nodes if str(n.target) == "aten.mul.Tensor")
    product.meta["mine"] = 1
    product.args = (product.args[0], 3)
    copy.module.graph.lint()
    assert captured.module.graph.python_code("self").src == text
    assert not any("mine" in n.meta for n in captured.module.graph.nodes)
    assert [n.name for n in copy.module.graph.nodes] == [n.name for n in captured.module.graph.nodes]
    assert (copy.inputs, copy.static_inputs) == (captured.inputs, captured.static_inputs)
    assert copy.module.graph.output_node().meta.keys() == captured.module.graph.output_node().meta.keys()


def test_keyword_arguments_and_structures() -> None:
    def model(pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Tensor]:
        first, rest = pair
        return {"y": first * rest["b"] * scale}

    captured = capture(model, ((X, {"b": X}),), {"scale": 2.0})
    assert sum(n.op == "placeholder" for n in captured.module.graph.nodes) == 1, "one tensor, given twice"


def test_symbolic_sizes_on_demand() -> None:
    for dynamic, kind in ((False, int), (True, torch.SymInt)):
        captured = capture(lambda x: x * 2, (X,), dynamic=dynamic)
        value = next(n for n in captured.module.graph.nodes if n.op == "call_function").meta["val"]
        assert type(value.shape[0]) is kind


def test_one_capture_after_the_other_is_its_own() -> None:
    """Dynamo reuses a graph whose guards hold; the second capture would see nothing."""
    first, second = (capture(lambda x: x * 2, (X,)) for _ in range(2))
    assert first.module is not second.module


# ----------------------------------------------------------------------------------- what cannot be captured


def data_dependent_branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def shapes_that_do_not_fit(x: Tensor) -> Tensor:
    y = x * 2
    return y @ y


def an_exception_of_its_own(x: Tensor) -> Tensor:
    raise ValueError("no such mode")


def an_attribute_that_is_not_there(x: Tensor) -> Tensor:
    return x.no_such_thing


def something_that_prints(x: Tensor) -> Tensor:
    breakpoint()
    return x


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(3) if x.max() > 1e9 else x


@pytest.mark.parametrize(
    ("function", "line", "text"),
    [
        (data_dependent_branch, "if x.sum() > 0:", "Data-dependent branching"),
        (shapes_that_do_not_fit, "return y @ y", "must have same reduction dim"),
        (an_exception_of_its_own, 'raise ValueError("no such mode")', "ValueError('no such mode')"),
        (an_attribute_that_is_not_there, "return x.no_such_thing", "no attribute 'no_such_thing'"),
        (something_that_prints, "breakpoint()", "breakpoint"),
        (nn.Sequential(nn.ReLU(), Inner()), "return torch.zeros(3) if x.max() > 1e9 else x", "branching"),
    ],
    ids=lambda v: getattr(v, "__name__", "") if callable(v) else "",
)
def test_a_model_that_cannot_be_captured_says_where_and_why(function: Callable[..., Any], line: str, text: str) -> None:
    for attempt in (lambda: capture(function, (X,)), lambda: run_captured(function, lambda m, i: m, (X,), {})):
        with pytest.raises(CaptureError) as caught:
            attempt()
        message = str(caught.value)
        assert f"test_capture.py:{line_of(line)} in " in message, message
        assert text in message and "remedy: " in message and caught.value.exit_code == 2
        assert "torch/_dynamo" not in message and len(message.splitlines()) <= 3


def test_a_model_that_computes_nothing() -> None:
    with pytest.raises(CaptureError, match="computes nothing on tensors"):
        capture(lambda x: 3, (X,))


def test_errors_of_a_backend_come_out_as_they_are() -> None:
    """Neither our own errors nor defects are about the user's line."""

    def refuses(module: Any, inputs: Any) -> Any:
        raise ConfigError("not like this", place="here", remedy="like that")

    def is_broken(module: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ConfigError, match="not like this"):
        run_captured(lambda x: x + 1, refuses, (X,), {})
    torch._dynamo.reset()
    with pytest.raises(ZeroDivisionError, match="a defect"):
        run_captured(lambda x: x + 1, is_broken, (X,), {})


def test_an_error_without_a_line_has_no_place() -> None:
    error = capture_error(RuntimeError("something\nExplanation: because"))
    assert error.place is None and "something. because" in str(error)


# ------------------------------------------------------------------------------------------------ provenance


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self']", ""),
        ("L['self'].layers.3.mlp", "layers.3.mlp"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self'].layers[3].mlp", "layers.3.mlp"),
        ("self.model.norm", "model.norm"),
        ("L['model'].layers[0]", "model.layers.0"),
        ("L['self'].a['b c'].d", "a.b c.d"),
    ],
)
def test_module_paths_are_dots_and_names(raw: str, path: str) -> None:
    assert normalise_module_path(raw) == path


def _frame(file: str, line: int) -> str:
    return f'  File "{file}", line {line}, in forward\n    x = y\n'


def test_the_line_is_the_innermost_one_of_the_user() -> None:
    torch_file = f"{Path(torch.__file__).parent}/nn/functional.py"
    trace = _frame("/home/me/net.py", 3) + _frame("/home/me/layers.py", 7) + _frame(torch_file, 99)
    assert trace_source_line(trace).endswith("layers.py:7 in forward")
    assert trace_source_line(_frame(torch_file, 99)).endswith("functional.py:99 in forward")
    assert trace_source_line("nothing") == UNKNOWN_SOURCE


def test_files_are_named_from_their_package_or_from_the_folder_at_hand() -> None:
    installed = "/opt/env/lib/python3.11/site-packages/transformers/models/net.py"
    assert trace_source_line(_frame(installed, 3)) == "transformers/models/net.py:3 in forward"
    assert trace_source_line(_frame(str(Path.cwd() / "models" / "net.py"), 3)) == "models/net.py:3 in forward"
    assert trace_source_line(_frame("/elsewhere/net.py", 3)) == "/elsewhere/net.py:3 in forward"


def test_a_folder_of_the_user_may_be_called_torch() -> None:
    torch_file = f"{Path(torch.__file__).parent}/nn/functional.py"
    assert trace_source_line(_frame("/home/me/torch/net.py", 3) + _frame(torch_file, 9)).endswith("net.py:3 in forward")


def test_a_new_node_inherits_from_the_last_source_that_knows() -> None:
    graph = torch.fx.Graph()
    known, unknown, new = (graph.placeholder(n) for n in ("known", "unknown", "new"))
    known.meta["stack_trace"] = _frame("/home/me/net.py", 3)
    known.meta["nn_module_stack"] = {"1": ("L['self'].layers.2", object)}
    inherit_meta(new, [known, unknown], "a_pass")
    assert source_line(new).endswith("net.py:3 in forward") and module_path(new) == "layers.2"
    assert [line.split("/")[-1] for line in model_lines(new)] == ["net.py:3 in forward"]
    assert module_path(unknown) == "" and source_line(unknown) == UNKNOWN_SOURCE and model_lines(unknown) == ()


def test_what_the_caller_has_compiled_stays_compiled() -> None:
    """A capture is of one model; the compiled code of others is none of its concern."""
    compiled = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return module.forward

    other = torch.compile(lambda x: x + 1, backend=backend)
    function, x = (lambda x: x * 2), torch.ones(3)
    with torch.no_grad():
        other(x)
        for _ in range(12):  # more often than Dynamo compiles one function
            nodes = len(capture(function, (x,)).module.graph.nodes)
            assert nodes == len(capture(function, (torch.ones(4),)).module.graph.nodes) == 3
        other(x)
        assert compiled == 1
        capture(function, (x,), reset=True)
        other(x)
        assert compiled == 2
