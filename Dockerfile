# docker build -t fused-mlp-server . && docker run -p 8000:8000 fused-mlp-server
# For a GPU: --build-arg BASE_IMAGE=nvidia/cuda:12.9.1-base-ubuntu24.04, and docker run --gpus all.
ARG BASE_IMAGE=debian:12-slim
FROM ${BASE_IMAGE}

# g++ and Python's headers are what the compiled backend builds with, at start-up.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 server
WORKDIR /app
COPY requirements/runtime.txt requirements/constraints.txt requirements/
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir -r requirements/runtime.txt

COPY kernels kernels
COPY models models
COPY service service

ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 MLP_HOST=0.0.0.0
USER server
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s CMD python3 -c "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"MLP_PORT\", 8000)}/v2/health/live', timeout=2)"
ENTRYPOINT ["python3", "-m", "service"]
