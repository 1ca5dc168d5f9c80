"""Made-up models and devices for tests of plans."""

from poptransformer.planning.devices import Device
from poptransformer.planning.footprint import Footprint, Part

MB = 10**6


def part(name, weight_mb, cache_mb=0, activation_mb=0, is_read=True):
    caches = {f"{name}.cache": cache_mb * MB} if cache_mb else {}
    return Part({name: weight_mb * MB}, frozenset([name] * is_read), caches, activation_mb * MB)


def footprint(num_layers=4, layer_mb=100, is_tied=False, num_replicas=1):
    """Embedding 50 MB, layers with a cache of 10 and activations of 5, a head of 60 (or the embedding)."""
    first = part("embedding", 50, activation_mb=1, is_read=False)
    last = part("embedding" if is_tied else "head", 50 if is_tied else 60, activation_mb=7)
    layers = tuple(part(f"layer {i}", layer_mb, 10, 5) for i in range(num_layers))
    return Footprint(first, layers, last, num_replicas)


def gpu(memory_mb, bandwidth=100.0):
    return Device("gpu", "gpu", memory_mb * MB, bandwidth)
