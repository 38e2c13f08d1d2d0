"""Short programs to copy from, each a page that runs: `python -m gefen_jax.lab.examples.NAME --help`.

* `fsdp`: a sharded run with checkpoints, continued on half of the devices.
* `many_hosts`: a run on several hosts that survives the loss of one.
* `host_offload`: optimizer state in host memory between steps.
* `from_adamw`: a running AdamW continues as Gefen, and back.
* `watching`: what quantisation costs during a run, and when to calibrate again.

All train a small byte-level language model on the sources of Python's standard library.
"""
