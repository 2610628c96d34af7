# vLLM with specdec in its environment: for the verifier with `--engine vllm`, and for an ordinary `vllm serve` that
# uses specdec's draft services (docs/vllm.md).
#
#   docker build -f deploy/images/vllm.Dockerfile -t specdec-vllm:0.1.0-cuda .
#
# docs/images.md lists all build arguments. BASE: any image with vLLM 0.32 in its `python3`, such as vLLM's own for
# CUDA.
ARG BASE=vllm/vllm-openai:v0.32.0

# 1. Build stage, not part of the image. The package index is set by these arguments, or by a pip.conf passed as a build
# secret, which leaves no trace.
FROM ${BASE} AS tools
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_INDEX_URL=${PIP_INDEX_URL} \
    PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0

# 2. specdec, as a wheel of the source tree, and the list of its requirements. A few packages get the versions of
# constraints.txt; vLLM's own packages, such as torch and numpy, stay unchanged.
FROM tools AS wheel
ARG EXTRAS=grammar,otel
COPY pyproject.toml constraints.txt README.md LICENSE deploy/images/requirements.py ./
COPY draft_service draft_service
COPY evaluation evaluation
COPY orchestrator orchestrator
COPY specdec specdec
COPY verifier_service verifier_service
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    mkdir /wheel \
    && python3 requirements.py pyproject.toml "${EXTRAS}" > /wheel/requirements.txt \
    && grep -E '^(cryptography|grpcio|llguidance|opentelemetry|structlog)[a-z_-]*==' constraints.txt > /wheel/constraints.txt \
    && /opt/tools/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

# 3. Runtime image: vLLM's environment, with specdec in it. pip warns that vLLM requires an older llguidance, which it
# uses for its own structured output. The newer one stays: all pods of a deployment should have the same version.
FROM ${BASE} AS vllm
ARG BASE
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,from=wheel,source=/opt/tools,target=/opt/tools \
    export PIP_INDEX_URL="${PIP_INDEX_URL}" PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" PIP_BREAK_SYSTEM_PACKAGES=1 \
    && python="$(command -v python3)" \
    && /opt/tools/bin/pip --python "${python}" install --no-cache-dir \
        --constraint /wheel/constraints.txt --requirement /wheel/requirements.txt \
    && /opt/tools/bin/pip --python "${python}" install --no-cache-dir --no-deps /wheel/*.whl \
    && mkdir --parents /usr/share/specdec \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /usr/share/specdec/sbom.json \
        "${python}" \
    && groupadd --gid 10001 specdec \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin specdec \
    && install -d -o 10001 -g 10001 -m 0700 /var/cache/specdec
COPY --chmod=0644 deploy/images/probe.py /usr/share/specdec/probe.py
ENV HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    SPECDEC_CACHE_DIR=/var/cache/specdec \
    SPECDEC_VERIFIER_HOST=0.0.0.0
WORKDIR /
EXPOSE 50051
USER 10001:10001
ENTRYPOINT ["specdec"]
CMD ["verifier", "--engine", "vllm"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="specdec vllm" \
    org.opencontainers.image.description="Speculative decoding: vLLM as the verifier's engine, and with our drafts" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
