"""The nine kinds of jobs of the Optimus paper (EuroSys 2018, table 1), as speed and loss curves.

The paper publishes models, parameter counts and, for ResNet-50, fitted speed coefficients and the
balance of its 157 parameter blocks. ResNet-50's blocks follow from its architecture; everything
else that is not published (the other models' speeds, curves and block sizes) is set here by
hand to plausible values for CPU workers over 1 GbE, the same for every policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from bytescheduler.cluster.models.speed import Mode

__all__ = ["KINDS", "Kind", "resnet50_blocks"]

# Per residual stage of ResNet-50: units, width of the 3x3 convolution, output channels.
_RESNET50_STAGES = ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of job.

    Attributes:
        blocks: parameters of each block.
        batch: total batch size of synchronous training (samples).
        compute: t0, seconds per sample (synchronous); a step of one worker takes ``mini`` samples.
        fixed, exchange, per_worker, per_server: t1, t2, t3 and t4 of the synchronous formula (s).
        loss: b0 (per epoch), b1 and b2 of the loss curve.
        steps_per_epoch: steps in one epoch of the (downscaled) data set.
    """

    name: str
    blocks: tuple[int, ...]
    batch: int
    mini: int
    compute: float
    fixed: float
    exchange: float
    per_worker: float
    per_server: float
    loss: tuple[float, float, float]
    steps_per_epoch: int

    def coefficients(self, mode: Mode) -> tuple[float, ...]:
        """Return the speed coefficients, synchronous or asynchronous."""
        if mode == "async":
            base = self.compute * self.mini + self.fixed
            return (base, self.exchange, self.per_worker, self.per_server)
        return (self.compute, self.fixed, self.exchange, self.per_worker, self.per_server)


def resnet50_blocks() -> tuple[int, ...]:
    """Return the sizes of ResNet-50's 157 blocks (version 2 with pre-activation, 1,000 classes)."""
    blocks = [3, 3, 64 * 3 * 49, 64, 64]
    channels = 64
    for units, width, out in _RESNET50_STAGES:
        for unit in range(units):
            blocks += [channels, channels, channels * width]
            blocks += [width, width, width * width * 9]
            blocks += [width, width, width * out]
            if unit == 0:
                blocks.append(channels * out)
            channels = out
    return (*blocks, channels, channels, channels * 1000, 1000)


def _layers(*groups: tuple[int, int]) -> tuple[int, ...]:
    """Return blocks from (number, parameters) groups, a bias of 256 after each."""
    return tuple(size for number, weight in groups for _ in range(number) for size in (weight, 256))


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="resnext-110",
            blocks=_layers((108, 15_500), (2, 20_000)),
            batch=128,
            mini=16,
            compute=0.05,
            fixed=0.3,
            exchange=0.35,
            per_worker=0.02,
            per_server=0.01,
            loss=(0.35, 0.9, 0.10),
            steps_per_epoch=120,
        ),
        Kind(
            name="resnet-50",
            blocks=resnet50_blocks(),
            batch=64,
            mini=4,
            compute=1.02,
            fixed=2.78,
            exchange=4.92,
            per_worker=0.0,
            per_server=0.02,
            loss=(0.25, 1.0, 0.15),
            steps_per_epoch=48,
        ),
        Kind(
            name="inception-bn",
            blocks=_layers((60, 150_000), (2, 1_100_000)),
            batch=64,
            mini=8,
            compute=0.45,
            fixed=1.2,
            exchange=2.2,
            per_worker=0.05,
            per_server=0.02,
            loss=(0.30, 1.0, 0.20),
            steps_per_epoch=60,
        ),
        Kind(
            name="kaggle-ndsb",
            blocks=_layers((8, 160_000), (1, 90_000)),
            batch=128,
            mini=16,
            compute=0.03,
            fixed=0.2,
            exchange=0.3,
            per_worker=0.03,
            per_server=0.01,
            loss=(0.5, 0.8, 0.12),
            steps_per_epoch=120,
        ),
        Kind(
            name="cnn-rand",
            blocks=_layers((1, 5_600_000), (3, 120_000)),
            batch=128,
            mini=16,
            compute=0.015,
            fixed=0.1,
            exchange=1.2,
            per_worker=0.04,
            per_server=0.01,
            loss=(0.6, 0.9, 0.08),
            steps_per_epoch=180,
        ),
        Kind(
            name="dssm",
            blocks=_layers((2, 700_000), (2, 40_000)),
            batch=128,
            mini=16,
            compute=0.02,
            fixed=0.1,
            exchange=0.3,
            per_worker=0.03,
            per_server=0.01,
            loss=(0.4, 0.9, 0.18),
            steps_per_epoch=180,
        ),
        Kind(
            name="rnn-lstm",
            blocks=_layers((2, 1_700_000), (4, 320_000)),
            batch=64,
            mini=8,
            compute=0.12,
            fixed=0.5,
            exchange=1.0,
            per_worker=0.04,
            per_server=0.02,
            loss=(0.3, 1.0, 0.25),
            steps_per_epoch=120,
        ),
        Kind(
            name="seq2seq",
            blocks=_layers((2, 3_000_000), (6, 510_000)),
            batch=64,
            mini=8,
            compute=0.30,
            fixed=0.8,
            exchange=1.9,
            per_worker=0.04,
            per_server=0.02,
            loss=(0.25, 1.0, 0.22),
            steps_per_epoch=120,
        ),
        Kind(
            name="deepspeech2",
            blocks=_layers((7, 5_100_000), (4, 500_000)),
            batch=32,
            mini=4,
            compute=1.6,
            fixed=2.0,
            exchange=6.5,
            per_worker=0.05,
            per_server=0.03,
            loss=(0.25, 1.0, 0.18),
            steps_per_epoch=72,
        ),
    )
}
