# The orchestrator and, with the command `openai`, OpenAI's HTTP API in front of orchestrators. One image serves both:
# neither needs weights or torch, and the API needs only two small packages more.
#
#   docker build -f deploy/images/orchestrator.Dockerfile -t specdec-orchestrator:0.1.0 .
#
# docs/images.md lists all build arguments. BASE: any image with Python 3.11 or newer as `python3`, and `venv`.
ARG BASE=python:3.11-slim-bookworm

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
FROM tools AS dependencies
ARG EXTRAS=orchestrator,openai,otel
COPY pyproject.toml constraints.txt deploy/images/requirements.py ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/specdec \
    && python3 requirements.py pyproject.toml "${EXTRAS}" > requirements.txt \
    && /opt/tools/bin/pip --python /opt/specdec/bin/python install --no-cache-dir --no-compile \
        --constraint constraints.txt --requirement requirements.txt \
    && find /opt/specdec/lib -depth -type d -name tests -exec rm -rf {} + \
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

# 5. Runtime image.
FROM ${BASE} AS orchestrator
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
    HF_HUB_OFFLINE=1 \
    SPECDEC_ORCHESTRATOR_HOST=0.0.0.0 \
    SPECDEC_OPENAI_HOST=0.0.0.0
WORKDIR /
EXPOSE 50050 8000
USER 10001:10001
ENTRYPOINT ["specdec"]
CMD ["orchestrator"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="specdec orchestrator" \
    org.opencontainers.image.description="Speculative decoding: the orchestrator, and OpenAI's HTTP API" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
