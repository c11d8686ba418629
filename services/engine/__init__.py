"""One inference engine for both phases. Domain code: no grpc, no protobuf, no asyncio."""
