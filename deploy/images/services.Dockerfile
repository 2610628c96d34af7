# The images of the three services, each chosen by ROLE:
#
#   orchestrator  the orchestrator and, with the command `openai`, OpenAI's HTTP API in front of orchestrators. Neither
#                 needs weights or torch, and the API needs only two small packages more
#   draft         the draft service, for exports by `specdec export`: ONNX Runtime without torch
#   verifier      the verifier, which also exports drafts to ONNX (`specdec export`) and fills cache folders
#                 (`specdec warm-up`)
#
#   docker build -f deploy/images/services.Dockerfile --build-arg ROLE=verifier -t specdec-verifier:0.1.0 .
#   docker build -f deploy/images/services.Dockerfile --build-arg ROLE=verifier --build-arg DEVICE=cuda \
#       -t specdec-verifier:0.1.0-cuda .
#
# docs/images.md lists all build arguments. BASE: any image with Python 3.11 or newer as `python3`, and `venv`.
ARG BASE=python:3.11-slim-bookworm
ARG DEVICE=cpu
ARG ROLE

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

# 2. Third-party packages, without their tests. This layer, the large one, depends only on pyproject.toml and
# constraints.txt, so it stays cached when our code changes. Bytecode is compiled with unchecked hashes: even if a copy
# changes file times, a read-only container never compiles at start-up. Errors in files for newer Pythons are ignored.
# PyPI's torch for Linux is a CUDA build; torch for CPUs has its own index. TORCH_INDEX sets torch's index; empty: the
# index of all other packages.
FROM tools AS dependencies
ARG ROLE
ARG DEVICE
ARG EXTRAS=
ARG TORCH_INDEX=default
COPY pyproject.toml constraints.txt deploy/images/requirements.py ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    case "${ROLE}-${DEVICE}" in \
        orchestrator-cpu | orchestrator-cuda) extras=orchestrator,openai,otel ;; \
        draft-cpu) extras=draft,otel ;; \
        draft-cuda) extras=draft-gpu,otel ;; \
        verifier-cpu) extras=verifier,export,otel ;; \
        verifier-cuda) extras=cuda,export,otel ;; \
        *) echo "DEVICE is ${DEVICE}, should be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && python3 -m venv --without-pip /opt/specdec \
    && python3 requirements.py pyproject.toml "${EXTRAS:-${extras}}" > requirements.txt \
    && if grep -q '^torch[^a-z]' requirements.txt; then \
        index=${TORCH_INDEX}; \
        if [ "${index}" = default ]; then \
            if [ "${DEVICE}" = cpu ]; then index=https://download.pytorch.org/whl/cpu; else index=; fi; \
        fi; \
        grep '^torch==' constraints.txt > torch.txt \
        && /opt/tools/bin/pip --python /opt/specdec/bin/python install --no-cache-dir --no-compile --no-deps \
            ${index:+--index-url "${index}"} --requirement torch.txt; \
    fi \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python install --no-cache-dir --no-compile \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/specdec/lib -depth \( -type d -name tests -o -path '*/torch/bin/test_*' -o -path '*/torch/include' \
        -o -path '*/torch/test' \) -exec rm -rf {} + \
    && { python3 -m compileall -qq --invalidation-mode unchecked-hash /opt/specdec/lib || true; }

# 3. specdec, as a wheel of the source tree, installed into its own folder.
FROM dependencies AS code
COPY README.md LICENSE ./
COPY draft_service draft_service
COPY evaluation evaluation
COPY orchestrator orchestrator
COPY specdec specdec
COPY verifier_service verifier_service
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/tools/bin/pip wheel --no-cache-dir --no-deps --wheel-dir dist . \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python install --no-cache-dir --no-compile --no-deps \
        --no-warn-script-location --prefix /code dist/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash -s /code -p /opt/specdec /code/lib

# 4. Both together: check that versions are compatible, and list the packages.
FROM code AS inventory
RUN cp -a /code/. /opt/specdec/ \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python check \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.json /opt/specdec/bin/python

# 5. Runtime image: the stage named ROLE, then the packages.
FROM ${BASE} AS runtime
RUN groupadd --gid 10001 specdec \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin specdec
ENV PATH=/opt/specdec/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    HF_HUB_OFFLINE=1
WORKDIR /
ENTRYPOINT ["specdec"]

FROM runtime AS orchestrator
ENV SPECDEC_ORCHESTRATOR_HOST=0.0.0.0 \
    SPECDEC_OPENAI_HOST=0.0.0.0
EXPOSE 50050 8000
CMD ["orchestrator"]
LABEL org.opencontainers.image.description="Speculative decoding: the orchestrator, and OpenAI's HTTP API"

FROM runtime AS draft
ENV SPECDEC_DRAFT_HOST=0.0.0.0
EXPOSE 50052
CMD ["draft"]
LABEL org.opencontainers.image.description="Speculative decoding: the draft service"

# On a GPU Triton compiles a launcher for each kernel at its first use, so only the CUDA verifier has a C compiler. Its
# version is not pinned, since Debian keeps no older versions.
FROM runtime AS verifier
ARG DEVICE
# hadolint ignore=DL3008
RUN install --directory --owner 10001 --group 10001 --mode 0700 /var/cache/specdec \
    && if [ "${DEVICE}" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/* \
        && gcc -fsyntax-only -I "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
            -include Python.h -x c /dev/null; \
    fi
ENV SPECDEC_CACHE_DIR=/var/cache/specdec \
    SPECDEC_VERIFIER_HOST=0.0.0.0
EXPOSE 50051
CMD ["verifier"]
LABEL org.opencontainers.image.description="Speculative decoding: the verifier"

FROM ${ROLE}
ARG BASE
ARG ROLE
COPY --from=dependencies /opt/specdec /opt/specdec
COPY --from=code /code /opt/specdec
COPY --from=inventory /sbom.json /usr/share/specdec/sbom.json
COPY --chmod=0644 deploy/images/probe.py /usr/share/specdec/probe.py
USER 10001:10001
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="specdec ${ROLE}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
