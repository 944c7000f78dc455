"""Python serving frameworks and OpenVINO on the same ONNX files, each in an environment of its own."""
