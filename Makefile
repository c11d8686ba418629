PY := .venv/bin/python

.PHONY: proto
proto:
	$(PY) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $$(find proto -name '*.proto')
	touch kvrelay/kv/__init__.py kvrelay/kv/v1/__init__.py kvrelay/inference/__init__.py kvrelay/inference/v1/__init__.py
