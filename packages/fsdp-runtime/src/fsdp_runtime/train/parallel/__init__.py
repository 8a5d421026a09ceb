"""The splits of a run: ``--hsdp``, ``--tp``, ``--pp``, ``--cp`` and ``--ep``. See `runtime.SplitRuntime`."""
