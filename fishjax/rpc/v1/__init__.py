"""Version 1 of the service: `tts_pb2` (messages), `tts_pb2_grpc` (stubs)."""
