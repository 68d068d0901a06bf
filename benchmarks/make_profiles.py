"""Derive the layer profiles in ``src/bytescheduler/simulate/profiles`` from model definitions.

A profile lists a model's layers in forward order with the bytes of their float32 gradients and
the multiply-accumulates (MACs) of one sample's forward pass. Convolutional networks are read off
MXNet's model zoo: the network runs once and every block that owns parameters reports its shapes.
The transformers and the recommender follow their published tables, cited below.

Normalisation layers (and other parameters that cost next to no compute) belong to the layer
before them. A weight that two layers share counts once, where the forward needs it first, since
its gradient is complete only after the backward of that layer.

Run ``python -m benchmarks.make_profiles`` with MXNet installed; ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "src" / "bytescheduler" / "simulate" / "profiles"
FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A line of a profile: ``forward_macs`` for one sample."""

    name: str
    gradient_bytes: int
    forward_macs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """A profile: ``batch`` is the usual number of samples per worker and iteration."""

    name: str
    source: str
    sample: str
    batch: int
    layers: tuple[LayerRow, ...]


def dense(name: str, inputs: int, outputs: int, *, times: int = 1, extra: int = 0) -> LayerRow:
    """A matrix product with bias, applied to ``times`` positions, plus ``extra`` parameters."""
    parameters = inputs * outputs + outputs + extra
    return LayerRow(
        name=name, gradient_bytes=parameters * FLOAT32, forward_macs=inputs * outputs * times
    )


def gluon_layers(model: str) -> tuple[LayerRow, ...]:
    """Layers of a network in MXNet's model zoo, for one image of 3 x 224 x 224."""
    import numpy

    numpy.bool = bool  # MXNet 1.9.1 reads this alias, which NumPy 1.24 removed.
    import mxnet

    network = mxnet.gluon.model_zoo.vision.get_model(model)
    network.initialize()
    rows: list[LayerRow] = []
    for block in _owners(network):
        block.register_forward_hook(
            lambda block, _, output: rows.append(_gluon_row(block, output.shape))
        )
    network(mxnet.nd.zeros((1, 3, 224, 224))).wait_to_read()
    return tuple(_fold(rows))


def _owners(block: Any) -> Iterator[Any]:
    if getattr(block, "_reg_params", None):
        yield block
    for child in block._children.values():
        yield from _owners(child)


def _gluon_row(block: Any, output: tuple[int, ...]) -> LayerRow:
    trained = [p for p in block._reg_params.values() if p.grad_req != "null"]
    size = sum(_product(p.shape) for p in trained) * FLOAT32
    weight = block._reg_params.get("weight")
    positions = _product(output[2:])
    macs = _product(weight.shape) * positions if weight is not None else 0
    return LayerRow(name=block.name, gradient_bytes=size, forward_macs=macs)


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= int(value)
    return result


def _fold(rows: list[LayerRow]) -> list[LayerRow]:
    """Give the parameters of layers without compute to the layer before."""
    folded: list[LayerRow] = []
    for row in rows:
        if row.forward_macs or not folded:
            folded.append(row)
        else:
            size = folded[-1].gradient_bytes + row.gradient_bytes
            folded[-1] = replace(folded[-1], gradient_bytes=size)
    return folded


def transformer_block(prefix: str, width: int, tokens: int) -> Iterator[LayerRow]:
    """One block of BERT or GPT-2: attention, then a feed-forward part four times as wide."""
    norm = 2 * width
    attention = 2 * tokens * tokens * width
    yield dense(f"{prefix}.qkv", width, 3 * width, times=tokens)
    out = dense(f"{prefix}.attention_out", width, width, times=tokens, extra=norm)
    yield replace(out, forward_macs=out.forward_macs + attention)
    yield dense(f"{prefix}.ffn_in", width, 4 * width, times=tokens)
    yield dense(f"{prefix}.ffn_out", 4 * width, width, times=tokens, extra=norm)


def embedding(name: str, rows: int, width: int, *, times: int, extra: int = 0) -> LayerRow:
    """A table with a dense gradient; a look-up costs one operation per value."""
    size = (rows * width + extra) * FLOAT32
    return LayerRow(name=name, gradient_bytes=size, forward_macs=width * times)


def bert_base() -> ModelRows:
    """Devlin et al. 2019, table of section 3; pre-training on 128 tokens with 20 predictions."""
    width, tokens, predicted, words = 768, 128, 20, 30522
    others = (512 + 2) * width + 2 * width
    layers = [embedding("embeddings", words, width, times=3 * tokens, extra=others)]
    for index in range(12):
        layers.extend(transformer_block(f"encoder.{index}", width, tokens))
    layers.append(dense("pooler", width, width))
    layers.append(dense("next_sentence", width, 2))
    layers.append(dense("predictions.transform", width, width, times=predicted, extra=2 * width))
    tied = LayerRow(
        name="predictions.decoder (tied)",
        gradient_bytes=words * FLOAT32,
        forward_macs=words * width * predicted,
    )
    return ModelRows(
        name="bert-base",
        source="BERT-base, uncased (Devlin et al., NAACL 2019): 12 blocks of width 768",
        sample="128 tokens, 20 of them predicted",
        batch=32,
        layers=(*layers, tied),
    )


def gpt2_small() -> ModelRows:
    """Radford et al. 2019, table 2, first row; the head shares the embedding's weight."""
    width, tokens, words = 768, 1024, 50257
    layers = [
        embedding("wte", words, width, times=tokens),
        embedding("wpe", 1024, width, times=tokens),
    ]
    for index in range(12):
        layers.extend(transformer_block(f"h.{index}", width, tokens))
    head = LayerRow(
        name="ln_f and head (tied)",
        gradient_bytes=2 * width * FLOAT32,
        forward_macs=words * width * tokens,
    )
    return ModelRows(
        name="gpt2-small",
        source="GPT-2, 117M (Radford et al., 2019): 12 blocks of width 768, tied head",
        sample="1024 tokens",
        batch=4,
        layers=(*layers, head),
    )


def recommender() -> ModelRows:
    """DLRM's published Criteo Kaggle setting (Naumov et al. 2019), its 26 tables in one."""
    bottom, top, dim, rows, tables = (13, 512, 256, 64, 16), (512, 256, 1), 16, 33_762_577, 26
    pairs = (tables + 1) * tables // 2
    features = pairs + dim
    layers = [dense(f"bottom.{index}", *sizes) for index, sizes in enumerate(pairwise(bottom))]
    layers.append(embedding("embedding", rows, dim, times=tables + pairs))
    widths = (features, *top)
    layers.extend(dense(f"top.{index}", *sizes) for index, sizes in enumerate(pairwise(widths)))
    return ModelRows(
        name="recommender",
        source="DLRM on Criteo Kaggle (Naumov et al., 2019), one embedding, dense gradients",
        sample="one advertisement",
        batch=2048,
        layers=tuple(layers),
    )


def zoo(name: str, model: str, batch: int) -> ModelRows:
    """A convolutional network of MXNet's model zoo."""
    return ModelRows(
        name=name,
        source=f"mxnet.gluon.model_zoo.vision, {model}",
        sample="one image, 3 x 224 x 224",
        batch=batch,
        layers=gluon_layers(model),
    )


def all_profiles() -> list[ModelRows]:
    """Every profile that the package ships."""
    return [
        zoo("vgg16", "vgg16", 32),
        zoo("resnet50", "resnet50_v1", 32),
        zoo("mobilenet_v2", "mobilenetv2_1.0", 64),
        bert_base(),
        gpt2_small(),
        recommender(),
    ]


def as_json(rows: ModelRows) -> str:
    """The text of a profile's file."""
    return json.dumps(asdict(rows), indent=1) + "\n"


def main() -> int:
    """Write the profiles, or with ``--check`` say which files differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    stale = 0
    for rows in all_profiles():
        path = FOLDER / f"{rows.name}.json"
        text = as_json(rows)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} differs", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
