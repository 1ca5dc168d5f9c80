"""The PopART backend: graphs as the ONNX that Graphcore's PopART compiles for IPUs. See docs/ipu.md."""
