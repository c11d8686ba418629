"""What stands between grpc and the servicers: errors become statuses, deadlines are applied, traces go on.

server side, outermost first   tracing.TraceServerInterceptor, errors.ErrorInterceptor, gate.GateInterceptor, deadline.DeadlineInterceptor
client side                    client.TracedChannel
"""
