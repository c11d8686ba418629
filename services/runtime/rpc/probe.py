"""For container health checks: `python -m services.runtime.rpc.probe HOST:PORT [NAME]` exits 0 when the service serves."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def serving(address: str, name: str = "") -> bool:
    """Whether `name` ('' is the process as a whole) is SERVING; False too when nobody answers within two seconds. Blocks."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if serving(*sys.argv[1:3]) else 1)
