ARG BASE_IMAGE=debian:12-slim
# Any base with apt and Python 3.11 or 3.12. A GPU needs no CUDA base: torch brings its own libraries, the host the driver.
#   docker build -t fused-mlp-server .
#   docker build -t fused-mlp-server:cpu --build-arg TORCH_BUILD=cpu --build-arg PIP_EXTRA_INDEX_URL=... .
#   docker build -t fused-mlp-server:gpu --build-arg TORCH_BUILD=cuda .
#   docker run --rm -p 8000:8000 -v mlp-cache:/cache -v "$PWD/out/mine:/models/mine:ro" fused-mlp-server --model /models/mine

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*

# Where pip looks. They stay in this stage, so that no credential in an address reaches the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# Which build of torch: cuda, the one that the plain index serves; cpu, cu130 and so on, the one with that local version,
# from an index that has it; empty, whichever pip prefers. The build fails where that one is not to be had.
ARG TORCH_BUILD=
WORKDIR /build
COPY requirements/runtime.txt requirements/constraints.txt requirements/
RUN version=$(sed -n 's/^torch==\([^; ]*\).*/\1/p' requirements/runtime.txt) \
 && case "${TORCH_BUILD}" in \
      "") torch="torch==${version}" ;; \
      cuda) torch="torch===${version}" ;; \
      *) torch="torch==${version}+${TORCH_BUILD}" ;; \
    esac \
 && python3 -m venv --without-pip /opt/venv \
 && python3 -m pip --python /opt/venv/bin/python3 install --no-cache-dir -r requirements/runtime.txt "${torch}" \
 && { [ "${TORCH_BUILD}" != cuda ] || /opt/venv/bin/python3 -c 'import sys, torch; torch.version.cuda or sys.exit(f"error: TORCH_BUILD=cuda: expected a CUDA build of torch, pip found {torch.__version__} without CUDA")'; }

COPY kernels /app/kernels
COPY models /app/models
COPY service /app/service
RUN chmod -R a+rX /app

FROM ${BASE_IMAGE}
# g++ and Python's headers: the compiled backend and Triton's launchers are built at start-up.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ libpython3-dev python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 server \
 && install -d /models \
 && install -d -o server -g server /cache
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app

# /models: mount model directories below it and name one, --model /models/NAME.
# /cache: compiled code; mount a volume to keep it from one container to the next.
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    MLP_HOST=0.0.0.0 MLP_CACHE_DIR=/cache
WORKDIR /app
USER server
EXPOSE 8000
STOPSIGNAL SIGTERM
# Healthy means ready. The port is that of process 1's command line, else MLP_PORT, else 8000.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python3", "-S", "-c", "import os, re, urllib.request; flag = re.search(r'\\0--port[=\\0](\\d+)', open('/proc/1/cmdline').read()); urllib.request.urlopen(f\"http://127.0.0.1:{flag[1] if flag else os.environ.get('MLP_PORT', '8000')}/v2/health/ready\", timeout=4)"]
ENTRYPOINT ["python3", "-m", "service"]
