# The draft service, for models that `specdec export` wrote: ONNX Runtime, and no torch.
#
#   docker build -f deploy/images/draft.Dockerfile -t specdec-draft:0.1.0 .
#   docker build -f deploy/images/draft.Dockerfile -t specdec-draft:0.1.0-cuda --build-arg DEVICE=cuda .
#
# docs/images.md tells of all arguments. BASE is any image whose `python3` is Python 3.11 or newer and has `venv`.
ARG BASE=python:3.11-slim-bookworm

# 1. What builds, and is left behind. Packages come from where the builder says: by these arguments, or by a pip.conf
# that is given as a secret and so leaves no trace.
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

# 2. What others wrote, without its tests. It follows from pyproject.toml and constraints.txt alone, so that this layer,
# the large one, stays as it is when our code changes. Bytecode is made to be taken unchecked: whatever a copy does to
# the times of files, a read-only container never compiles at its start. Files for newer Pythons need not compile.
FROM tools AS dependencies
ARG DEVICE=cpu
ARG EXTRAS=
COPY pyproject.toml constraints.txt deploy/images/requirements.py ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    case "${DEVICE}" in \
        cpu) extras=draft,otel ;; \
        cuda) extras=draft-gpu,otel ;; \
        *) echo "DEVICE is ${DEVICE}, should be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && python3 -m venv --without-pip /opt/specdec \
    && python3 requirements.py pyproject.toml "${EXTRAS:-${extras}}" > requirements.txt \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python install --no-cache-dir --no-compile \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/specdec/lib -depth -type d -name tests -exec rm -rf {} + \
    && { python3 -m compileall -qq --invalidation-mode unchecked-hash /opt/specdec/lib || true; }

# 3. Our code, as a wheel of the source tree, installed into a folder of its own.
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

# 4. Both together: do they fit, and what is in them?
FROM code AS inventory
RUN cp -a /code/. /opt/specdec/ \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python check \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.json /opt/specdec/bin/python

# 5. What runs.
FROM ${BASE} AS draft
ARG BASE
RUN groupadd --gid 10001 specdec \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin specdec
COPY --from=dependencies /opt/specdec /opt/specdec
COPY --from=code /code /opt/specdec
COPY --from=inventory /sbom.json /usr/share/specdec/sbom.json
COPY --chmod=0644 deploy/images/probe.py /usr/share/specdec/probe.py
ENV PATH=/opt/specdec/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    HF_HUB_OFFLINE=1 \
    SPECDEC_DRAFT_HOST=0.0.0.0
WORKDIR /
EXPOSE 50052
USER 10001:10001
ENTRYPOINT ["specdec"]
CMD ["draft"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="specdec draft" \
    org.opencontainers.image.description="Speculative decoding: the draft service" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
