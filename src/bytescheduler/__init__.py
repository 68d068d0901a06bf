"""Priority scheduling of gradient communication for distributed deep-learning training.

Importing this package is cheap and has no side effect. Pick the adapter of your framework:
``bytescheduler.torch``, ``bytescheduler.tensorflow`` or ``bytescheduler.mxnet``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
