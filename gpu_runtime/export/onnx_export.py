"""ModelSpec → ExportedModel: a graph with a dynamic batch (and length), pre- and post-processing in it, proved.

An exported file is trusted only after it was opened in ONNX Runtime and `parity` held it against the module.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.artifacts import Artifact, ArtifactStore, file_digest
from gpu_runtime.errors import ExportError
from gpu_runtime.export.parity import ParityReport, check_batching, check_padding, compare, proof_length
from gpu_runtime.specs import (
    LENGTH,
    Graph,
    ImageNormalization,
    ModelSpec,
    OnnxSource,
    Postprocess,
    TensorSpec,
    TopK,
    TorchSource,
    digest_of,
    synthetic_rows,
    tensor_specs,
    to_plain,
)

KIND = "onnx_model"
OPSET = 20
_BATCH, _LENGTH = "batch", "length"
_ALL_OF_IT = 1.001
"""A probability's maximum: the sum of rounded ones may pass 1."""


@dataclass(frozen=True)
class ExportedModel:
    """The ONNX file of a model in FP32 and what is known of it."""

    artifact: Artifact

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def spec(self) -> str:
        """Digest of the spec that was exported."""
        return str(self.artifact.metadata["spec"])

    @property
    def parity(self) -> ParityReport:
        return ParityReport(**self.artifact.metadata["parity"])

    def graph(self) -> Graph:
        """The FP32 graph in the form backends take."""
        facts = self.artifact.metadata
        return Graph(
            path=self.artifact.file("model.onnx"),
            digest=self.artifact.files["model.onnx"],
            variant="fp32",
            precision="fp32",
            scheme=None,
            inputs=tensor_specs(facts["inputs"]),
            outputs=tensor_specs(facts["outputs"]),
            max_batch=facts["max_batch"],
            max_length=facts["max_length"],
        )


def export_model(spec: ModelSpec, store: ArtifactStore) -> ExportedModel:
    """Export `spec`, prove it and keep it in `store`.

    It is exported every time: what a module computes hangs on more than its weights and its class, and no digest of
    sources tells all of it. The same graph has the same content digest, so nothing downstream changes for it.
    Raises `ExportError` when the graph has a fixed batch, mixes rows or computes something else.
    """
    source = _open_torch(spec) if isinstance(spec.source, TorchSource) else _open_onnx(spec)
    with store.draft(KIND, [spec.digest]) as draft:
        core, path = draft.folder / "core.onnx", draft.folder / "model.onnx"
        source.write(core)
        bake(core, path, spec)
        run, core_run = _open_checked(path, spec), _open_checked(core, spec)
        outputs = output_specs(run, spec)
        parity = compare(source, core_run, run, spec)
        outputs = _with_classes(outputs, core_run, spec)
        check_batching(run, spec)
        check_padding(run, spec)
        core.unlink()
        draft.metadata = {
            "model": spec.name,
            "version": spec.version,
            "spec": spec.digest,
            "opset": OPSET,
            "inputs": to_plain(spec.inputs),
            "outputs": to_plain(outputs),
            "max_batch": spec.max_batch,
            "max_length": spec.max_length,
            "weights_digest": source.weights_digest,
            "parity": to_plain(parity),
        }
    return ExportedModel(draft.finished())


class TorchModel:
    """A torch module in eval mode: the origin and the reference of an export."""

    def __init__(self, module: Any, spec: ModelSpec) -> None:
        self._module, self._spec = module, spec
        self.weights_digest = _weights_digest(module)

    def write(self, path: Path) -> None:
        import onnx
        import torch

        # It warns once for each torchvision operator wherever torchvision is not installed.
        logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
        spec, batch, length = self._spec, min(2, self._spec.max_batch), proof_length(self._spec)
        rows = synthetic_rows(spec.module_inputs(), batch, 0, length)
        try:
            self(rows)
        except Exception as error:
            if isinstance(error, ExportError):
                raise
            raise ExportError(
                "the module fails on rows of the declared inputs",
                stage="export",
                item=spec.name,
                expected=", ".join(f"{t.name} {t.dtype} {t.batch_shape(batch, length)}" for t in spec.module_inputs()),
                got=f"{type(error).__name__}: {error}",
                next_step="make `inputs` in defs.yaml what the module takes, in its order",
            ) from error
        axis = torch.export.Dim(_BATCH, min=1, max=max(2, spec.max_batch))
        along = torch.export.Dim(_LENGTH, min=1, max=spec.max_length) if spec.max_length else None
        try:
            program = torch.onnx.export(
                self._module,
                tuple(torch.from_numpy(rows[t.name]) for t in spec.inputs),
                dynamo=True,
                opset_version=OPSET,
                input_names=[t.name for t in spec.inputs],
                output_names=list(spec.outputs),
                dynamic_shapes=tuple(
                    {0: axis} | ({1 + t.shape.index(LENGTH): along} if t.has_length else {}) for t in spec.inputs
                ),
                verbose=False,
            )
        except Exception as error:
            raise ExportError(
                f"torch could not export the module with a dynamic batch{' and length' if length else ''}",
                stage="export",
                item=spec.name,
                expected=f"a module whose Python does not depend on the batch size (1 … {spec.max_batch})"
                + (f" nor on the length (1 … {spec.max_length})" if length else ""),
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                next_step="remove branches on shapes from forward()",
            ) from error
        assert program is not None
        onnx.save(program.model_proto, str(path))

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Module inputs `[n, …]` to module outputs, in FP32."""
        import torch

        with torch.inference_mode():
            out = self._module(*(torch.from_numpy(inputs[t.name]) for t in self._spec.inputs))
        values = out if isinstance(out, tuple | list) else (out,)
        if len(values) != len(self._spec.outputs):
            raise ExportError(
                "the module returns another number of outputs",
                stage="export",
                item=self._spec.name,
                expected=", ".join(self._spec.outputs),
                got=f"{len(values)} outputs",
            )
        return {name: value.numpy() for name, value in zip(self._spec.outputs, values, strict=True)}


class OnnxModel:
    """An ONNX file as the origin; it is its own reference."""

    def __init__(self, path: Path) -> None:
        from gpu_runtime.backends.onnxruntime_backend import ReferenceSession

        self._path, self.weights_digest = path, _onnx_digest(path)
        self._run = ReferenceSession(path, optimize=False)

    def write(self, path: Path) -> None:
        import onnx

        onnx.save(onnx.load(str(self._path)), str(path))  # external data is brought along

    def __call__(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return self._run(inputs)


def _open_torch(spec: ModelSpec) -> TorchModel:
    import torch

    assert isinstance(spec.source, TorchSource)
    module_name, _, function = spec.source.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ExportError(
            f"the factory cannot be imported: {error}",
            stage="export",
            item=spec.source.factory,
            expected="an importable module:function that returns a torch.nn.Module",
            next_step="install the model's extra, or correct `factory` in defs.yaml",
        ) from error
    module = factory()
    if not isinstance(module, torch.nn.Module):
        raise ExportError(
            "the factory made something else",
            stage="export",
            item=spec.source.factory,
            expected="torch.nn.Module",
            got=type(module).__name__,
        )
    # Dropout and batch statistics left on change every answer: the module is never exported in train mode.
    return TorchModel(module.eval(), spec)


def _open_onnx(spec: ModelSpec) -> OnnxModel:
    assert isinstance(spec.source, OnnxSource)
    path = Path(spec.source.path)
    if not path.is_file():
        raise ExportError("no such ONNX file", stage="export", item=spec.source.path)
    try:
        return OnnxModel(path)
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime does not open the file: {error}", stage="export", item=spec.source.path
        ) from error


def _onnx_digest(path: Path) -> str:
    """Digest of an ONNX file and of the files beside it that hold its weights."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, _get_all_tensors, uses_external_data

    model = onnx.load(str(path), load_external_data=False)
    beside = {ExternalDataInfo(tensor).location for tensor in _get_all_tensors(model) if uses_external_data(tensor)}
    return digest_of([file_digest(path), [file_digest(path.parent / name) for name in sorted(beside)]])


def _weights_digest(module: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        array = tensor.detach().cpu().contiguous()
        digest.update(f"{name}:{array.dtype}:{tuple(array.shape)}".encode())
        digest.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def _open_checked(path: Path, spec: ModelSpec) -> Any:
    from gpu_runtime.backends.onnxruntime_backend import ReferenceSession

    try:
        return ReferenceSession(path)
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime does not open the exported graph: {error}",
            stage="export",
            item=spec.name,
            next_step="an output named like an inner value is the usual cause: choose another output name",
        ) from error


def output_specs(run: Any, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Names, dtypes and row shapes that the finished graph really gives."""
    rows, length = min(2, spec.max_batch), proof_length(spec)
    try:
        made = run(synthetic_rows(spec.inputs, rows, 1, length))
        longer = run(synthetic_rows(spec.inputs, rows, 1, spec.max_length)) if length else made
    except Exception as error:
        raise ExportError(
            f"the graph does not take the declared inputs: {error}",
            stage="export",
            item=spec.name,
            expected=", ".join(f"{t.name} {t.dtype} {t.batch_shape(rows, length)}" for t in spec.inputs),
            next_step="correct the inputs' dtypes and shapes in defs.yaml",
        ) from error
    found = []
    for name, value in made.items():
        if value.ndim < 1 or value.shape[0] != rows:
            raise ExportError(
                "an output has no batch dimension",
                stage="export",
                item=f"{spec.name}.{name}",
                expected=f"[{rows}, …] for a batch of {rows}",
                got=str(value.shape),
            )
        if longer[name].shape != value.shape:
            raise ExportError(
                "an output grows with the length",
                stage="export",
                item=f"{spec.name}.{name}",
                expected="one result of a fixed shape for each row",
                got=f"{value.shape} of length {length}, {longer[name].shape} of length {spec.max_length}",
                next_step="pool over the length in the model, as a mean over the mask does",
            )
        bounds = _bounds(spec, name)
        found.append(TensorSpec(name, str(value.dtype), value.shape[1:], *bounds))  # type: ignore[arg-type]
    return tuple(found)


def _with_classes(outputs: tuple[TensorSpec, ...], core_run: Any, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """With the largest index that an index output can be, which is in the graph before what was baked behind it."""
    raw_of = {name: name for name, kind in spec.postprocess.items() if kind == "argmax"}
    if spec.top_k:
        raw_of = {"top_index": spec.outputs[0]}
    if not raw_of:
        return outputs
    raw = core_run(synthetic_rows(spec.module_inputs(), 1, 1, proof_length(spec)))
    return tuple(replace(t, maximum=raw[raw_of[t.name]].shape[1] - 1) if t.name in raw_of else t for t in outputs)


def _bounds(spec: ModelSpec, output: str) -> tuple[float | None, float | None, bool]:
    """What the output can be: its minimum, its maximum, and whether a row of equal values is degenerate."""
    if output in spec.postprocess:  # an index's maximum: see `_with_classes`
        return (0, None, False) if spec.postprocess[output] == "argmax" else (0.0, _ALL_OF_IT, False)
    if spec.top_k is None:
        return (*spec.output_ranges.get(output, (None, None)), False)
    if output == "top_index":
        return 0, None, False
    # With fewer than three scores a tie can be meant.
    return 0.0, _ALL_OF_IT, spec.top_k.k >= 3


def bake(core: Path, target: Path, spec: ModelSpec) -> None:
    """Put normalisation in front of the graph, and behind it what makes its outputs small."""
    import onnx

    model = onnx.load(str(core))
    _check_names(model, spec)
    _free_batch_dimension(model, spec)
    for name, normalization in spec.normalize.items():
        tensor = next(t for t in spec.inputs if t.name == name)
        _normalize_input(model, tensor, normalization)
    if spec.top_k:
        _append_top_k(model, spec.outputs[0], spec.top_k)
    for output, kind in spec.postprocess.items():
        _postprocess(model, spec, output, kind)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the graph is not valid ONNX: {error}", stage="export", item=spec.name) from error
    onnx.save(model, str(target))


def _check_names(model: Any, spec: ModelSpec) -> None:
    held = {i.name for i in model.graph.initializer}
    found = [v.name for v in model.graph.input if v.name not in held]
    expected = [t.name for t in spec.inputs]
    if sorted(found) != sorted(expected):
        raise ExportError(
            "the graph has other inputs than the spec",
            stage="export",
            item=spec.name,
            expected=", ".join(expected),
            got=", ".join(found),
        )
    missing = set(spec.outputs) - {v.name for v in model.graph.output}
    if missing:
        raise ExportError(
            "the graph lacks outputs",
            stage="export",
            item=spec.name,
            expected=", ".join(spec.outputs),
            got=", ".join(v.name for v in model.graph.output),
        )


def _free_batch_dimension(model: Any, spec: ModelSpec) -> None:
    held = {i.name for i in model.graph.initializer}  # older files list their weights among the inputs
    for value in model.graph.input:
        if value.name in held:
            continue
        dims = value.type.tensor_type.shape.dim
        if not dims or (dims[0].HasField("dim_value") and spec.max_batch > 1):
            fixed = dims[0].dim_value if dims else "none"
            raise ExportError(
                "its first dimension is fixed",
                stage="export",
                item=f"{spec.name}.{value.name}",
                expected=f"a dynamic batch, 1 … {spec.max_batch}",
                got=str(fixed),
                next_step="export it with a dynamic first dimension",
            )
        dims[0].dim_param = _BATCH
        tensor = next(t for t in spec.inputs if t.name == value.name)
        if tensor.has_length and len(dims) == 1 + len(tensor.shape):
            along = dims[1 + tensor.shape.index(LENGTH)]
            if along.HasField("dim_value"):
                raise ExportError(
                    "its length is fixed",
                    stage="export",
                    item=f"{spec.name}.{value.name}",
                    expected=f"a dynamic length, 1 … {spec.max_length}",
                    got=str(along.dim_value),
                    next_step="export it with that dimension dynamic, or declare its shape without -1",
                )
            along.dim_param = _LENGTH
    for value in model.graph.output:
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = _BATCH


def _normalize_input(model: Any, tensor: TensorSpec, normalization: ImageNormalization) -> None:
    """uint8 `[N, H, W, C]` → Transpose → Cast → (x − mean) × 1/std → the module's float32 `[N, C, H, W]`.

    Transposing bytes moves a quarter of what transposing floats would: 16 % of a small INT8 network's time.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, name = model.graph, tensor.name
    height, width, channels = tensor.shape
    inner = f"{name}__normalized"
    for node in graph.node:
        node.input[:] = [inner if used == name else used for used in node.input]
    mean = np.asarray(normalization.mean, np.float32).reshape(1, channels, 1, 1)
    scale = (1.0 / np.asarray(normalization.std, np.float32)).reshape(1, channels, 1, 1)
    graph.initializer.extend(
        [numpy_helper.from_array(mean, f"{name}__mean"), numpy_helper.from_array(scale, f"{name}__scale")]
    )
    front = [
        helper.make_node("Transpose", [name], [f"{name}__nchw"], f"{name}__transpose", perm=[0, 3, 1, 2]),
        helper.make_node("Cast", [f"{name}__nchw"], [f"{name}__float"], f"{name}__cast", to=TensorProto.FLOAT),
        helper.make_node("Sub", [f"{name}__float", f"{name}__mean"], [f"{name}__centred"], f"{name}__sub"),
        helper.make_node("Mul", [f"{name}__centred", f"{name}__scale"], [inner], f"{name}__mul"),
    ]
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend(front + rest)
    place = next(i for i, value in enumerate(graph.input) if value.name == name)
    graph.input[place].CopyFrom(
        helper.make_tensor_value_info(name, TensorProto.UINT8, [_BATCH, height, width, channels])
    )


def _append_top_k(model: Any, output: str, top_k: TopK) -> None:
    """logits `[N, classes]` → Softmax → TopK → `top_score` float32, `top_index` int32, both `[N, k]`."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    graph.initializer.append(numpy_helper.from_array(np.asarray([top_k.k], np.int64), "top_k__k"))
    graph.node.extend(
        [
            helper.make_node("Softmax", [output], ["top_k__probability"], "top_k__softmax", axis=-1),
            helper.make_node(
                "TopK",
                ["top_k__probability", "top_k__k"],
                ["top_score", "top_k__index"],
                "top_k__topk",
                axis=-1,
            ),
            helper.make_node("Cast", ["top_k__index"], ["top_index"], "top_k__cast", to=TensorProto.INT32),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        [
            helper.make_tensor_value_info("top_index", TensorProto.INT32, [_BATCH, top_k.k]),
            helper.make_tensor_value_info("top_score", TensorProto.FLOAT, [_BATCH, top_k.k]),
        ]
    )


def _postprocess(model: Any, spec: ModelSpec, output: str, kind: Postprocess) -> None:
    """The output `[N, classes, …]` becomes its softmax, or the index of its largest class (-1 where a class is NaN or
    +∞), under the same name."""
    from onnx import TensorProto, helper, numpy_helper

    graph, raw = model.graph, f"{output}__raw"
    place = next(i for i, value in enumerate(graph.output) if value.name == output)
    dims = [dim.dim_param or dim.dim_value for dim in graph.output[place].type.tensor_type.shape.dim]
    if len(dims) < 2:
        raise ExportError(
            "has no classes to choose from",
            stage="export",
            item=f"{spec.name}.{output}",
            expected="[N, classes, …]",
            got=str(dims),
            next_step="leave it out under `postprocess`",
        )
    for node in graph.node:
        node.input[:] = [raw if used == output else used for used in node.input]
        node.output[:] = [raw if made == output else made for made in node.output]
    if kind == "softmax":
        graph.node.append(helper.make_node("Softmax", [raw], [output], f"{output}__softmax", axis=1))
        return
    index, whole, known = f"{output}__index", f"{output}__int32", f"{output}__finite"
    graph.node.append(helper.make_node("ArgMax", [raw], [index], f"{output}__argmax", axis=1, keepdims=0))
    graph.node.append(helper.make_node("Cast", [index], [whole], f"{output}__cast", to=TensorProto.INT32))
    graph.node.extend(_has_a_largest(model, raw, known, graph.output[place].type.tensor_type.elem_type))
    # ArgMax finds some class all the same: -1 is none, and outside the output's range.
    graph.initializer.append(numpy_helper.from_array(np.asarray(-1, np.int32), f"{output}__none"))
    graph.node.append(helper.make_node("Where", [known, whole, f"{output}__none"], [output], f"{output}__where"))
    graph.output[place].CopyFrom(helper.make_tensor_value_info(output, TensorProto.INT32, [dims[0], *dims[2:]]))


def _has_a_largest(model: Any, raw: str, known: str, element: int) -> list[Any]:
    """Nodes that tell, for `raw` `[N, classes, …]`, where no class is NaN or +∞, as bool `[N, …]`: the sum over the
    classes is neither then, and one sum is less work than a test of each. (-∞ is how a model masks a class.)"""
    from onnx import TensorProto, helper, numpy_helper

    sums, most = f"{known}__sum", f"{known}__most"
    axes = numpy_helper.from_array(np.asarray([1], np.int64), f"{known}__axes")
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(np.finfo(np.float32).max, np.float32), most))
    opset = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    if opset >= 13:
        model.graph.initializer.append(axes)
        add = helper.make_node("ReduceSum", [raw, axes.name], [sums], f"{known}__add", keepdims=0)
    else:
        add = helper.make_node("ReduceSum", [raw], [sums], f"{known}__add", keepdims=0, axes=[1])
    nodes, wide = [add], sums
    if element != TensorProto.FLOAT:
        wide = f"{known}__wide"
        nodes.append(helper.make_node("Cast", [sums], [wide], f"{known}__widen", to=TensorProto.FLOAT))
    return [
        *nodes,
        helper.make_node("Less", [wide, most], [known], f"{known}__less"),
    ]
