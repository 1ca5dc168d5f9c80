"""Which JAX device runs the graphs, and where compiled programs are kept."""

from __future__ import annotations

import logging
import os
import pathlib
import platform as platform_module
import tempfile

import jax

from poptransformer.errors import UserError

logger = logging.getLogger(__name__)

PLATFORMS = ("auto", "cpu", "cuda", "tpu")


def pick_devices(platform: str, world_size: int = 1, num_stages: int = 1, num_processes: int = 1) -> list[list]:
    """Return JAX devices of a platform for each stage, one for each rank; "auto" leaves the platform to JAX (an accelerator
    where there is one).

    With several processes each of them has as many ranks of every stage, so that values go from stage to stage within it.

    CPU devices beyond the first are virtual: they share the processor, and behave as so many accelerators would. JAX makes them
    when it starts, so the first Session of a process decides how many there are at most.

    JAX starts every platform it finds, and reserves memory on GPUs, even when only the CPU is wanted; the environment
    variable JAX_PLATFORMS=cpu keeps it from that.

    Raises: UserError when the platform is unknown or has too few devices here, with what there is.
    """
    if platform not in PLATFORMS:
        raise UserError(f"platform={platform!r} is unknown; choose one of {', '.join(PLATFORMS)}")
    if world_size % num_processes:
        raise UserError(
            f"num_replicas={world_size} cannot be spread over {num_processes} processes; set a multiple of {num_processes}"
        )
    ranks_here = world_size // num_processes
    count = ranks_here * num_stages
    if platform in ("auto", "cpu") and count > jax.config.jax_num_cpu_devices:
        _make_cpu_devices(count)
    try:
        devices = jax.devices() if platform == "auto" else jax.devices(platform)
    except RuntimeError:
        there = sorted({device.platform for device in jax.devices()})
        raise UserError(
            f"platform={platform!r}: JAX sees no such device here, only {', '.join(there)}; "
            f"for NVIDIA GPUs install jax[cuda13], or set session.platform=auto"
        ) from None
    by_process = [[device for device in devices if device.process_index == i] for i in range(num_processes)]
    fewest = min(map(len, by_process))
    if fewest < count:
        why = ""
        if devices[0].platform == "cpu":
            why = (
                "; JAX makes virtual CPU devices when it starts: open the Session that wants most of them first, or set the "
                f"environment variable JAX_NUM_CPU_DEVICES={count}"
            )
        each = "" if num_processes == 1 else f" in each of {num_processes} processes"
        raise UserError(
            f"{count} devices are wanted{each} (num_replicas times the stages of layers_per_device); JAX sees {fewest} of "
            f"platform {devices[0].platform} here{why}"
        )
    return [
        [device for own in by_process for device in own[stage * ranks_here : (stage + 1) * ranks_here]]
        for stage in range(num_stages)
    ]


def _make_cpu_devices(count):
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX is up already: the caller counts what there is


def cpu_name() -> str:
    """The processor's name in words, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform_module.processor() or platform_module.machine()


def default_cache_dir() -> pathlib.Path:
    """The user's cache folder for compiled programs: $XDG_CACHE_HOME/poptransformer/xla."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "poptransformer" / "xla"


def use_compile_cache(folder: str | None) -> None:
    """Keep every compiled program in JAX's persistent cache. The setting is the process's: the last Session's folder wins.

    Args:
      folder: None for the user's cache folder (none, with a warning, where it cannot be written), "" for no cache.
    Raises: UserError if a folder that was given cannot be written.
    """
    from jax.experimental.compilation_cache import compilation_cache

    value = None if folder == "" else str(folder or default_cache_dir())
    if value:
        try:
            value = os.path.expanduser(value)
            os.makedirs(value, exist_ok=True)
            tempfile.TemporaryFile(dir=value).close()
        except (OSError, ValueError) as error:
            if folder is not None:
                raise UserError(f"execution_cache_dir={folder!r} cannot be written: {error}") from None
            logger.warning("compiled programs are not kept: %s cannot be written: %s", value, error)
            value = None
    if jax.config.jax_compilation_cache_dir != value:
        jax.config.update("jax_compilation_cache_dir", value)
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
