{{/* Pods: containers, volumes and probes. */}}

{{/* The template of a workload's pods. Takes a list: root, the workload. */}}
{{- define "specdec.pod" -}}
{{- $root := index . 0 }}{{ $w := index . 1 }}
{{- $selector := include "specdec.selector" (list $root $w.role $w.pool) | fromYaml }}
{{- $labels := deepCopy $w.podLabels }}
{{- include "specdec.lay" (list $labels $selector) }}
{{- $annotations := deepCopy $w.podAnnotations }}
{{- $_ := set $annotations "checksum/config" (include "specdec.options" (list $root $w) | sha256sum) }}
{{- $caches := dig "cache" "enabled" false $w }}
{{- $storage := (include "specdec.storage" (list $root $w) | fromYaml).all -}}
metadata:
  labels:{{ toYaml $labels | nindent 4 }}
  annotations:{{ toYaml $annotations | nindent 4 }}
spec:
  serviceAccountName: {{ include "specdec.name" (list $root $w.role "") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # preStop, drain, and time to close.
  terminationGracePeriodSeconds: {{ add $w.preStopSeconds $w.drainSeconds 10 }}
  securityContext:{{ toYaml $w.podSecurityContext | nindent 4 }}
  {{- if and $w.modelVolume.download (ne $w.role "openai") }}
  initContainers:
    - name: download
      {{- /* CPU and disk as of the service, so the pod needs no more for it. A quota of the namespace refuses pods with
      containers that do not name them, and Kubernetes gives cores of its own only to pods whose containers all have
      limits of CPU and memory. */}}
      {{- $resources := dict "limits" (dict "memory" "2Gi") }}
      {{- $ofService := include "specdec.resources" $w | fromYaml }}
      {{- range $part := list "requests" "limits" }}
      {{- $shared := pick (dig $part dict $ofService) "cpu" "ephemeral-storage" }}
      {{- include "specdec.lay" (list $resources (dict $part $shared)) }}
      {{- end }}
      {{- include "specdec.layResources" (list $resources (default dict $w.modelVolume.download.resources)) }}
      {{- toYaml (omit $w.modelVolume.download "sizeLimit" "env" "resources") | nindent 6 }}
      resources:{{ toYaml $resources | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        {{- with $w.modelVolume.download.env }}{{ toYaml . | nindent 8 }}{{ end }}
      securityContext:{{ toYaml $w.securityContext | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ $w.role }}
      image: {{ include "specdec.image" (list $root $w.image $w.gpus) | quote }}
      imagePullPolicy: {{ $w.image.pullPolicy }}
      args: [{{ $w.role }}, --config, /etc/specdec/config/config.yaml]    # of the image's entrypoint, `specdec`
      env:
        # Libraries need a home folder, and the root file system is read-only.
        - {name: HOME, value: /tmp}
        {{- if $caches }}
        # The service creates this folder itself, since it uses none that others may write to.
        - {name: SPECDEC_CACHE_DIR, value: /var/cache/specdec/own}
        {{- end }}
        {{- with $w.env }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - {name: main, containerPort: {{ include "specdec.port" $w.role }}}
        {{- if ne $w.role "openai" }}
        - {name: health, containerPort: 8086}
        {{- end }}
        - {name: metrics, containerPort: 9090}
      {{- include "specdec.probes" (list $root $w) | nindent 6 }}
      {{- if $w.preStopSeconds }}
      lifecycle: {preStop: {sleep: {seconds: {{ $w.preStopSeconds }}}}}
      {{- end }}
      resources:
        {{- include "specdec.resources" $w | nindent 8 }}
      securityContext:{{ toYaml $w.securityContext | nindent 8 }}
      volumeMounts:
        {{- range $storage }}
        - {name: {{ .name }}, mountPath: {{ .at }}{{ if .readOnly }}, readOnly: true{{ end }}}
        {{- end }}
  volumes:
    {{- range $storage }}
    - name: {{ .name }}
      {{- toYaml .source | nindent 6 }}
    {{- end }}
  {{- $as := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
  {{- range $name := $as }}
  {{- with get $w $name }}{{ toYaml (dict $name .) | nindent 2 }}{{ end }}
  {{- end }}
  {{- with $w.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $constraint := deepCopy . }}
    {{- if not .labelSelector }}{{ $_ := set $constraint "labelSelector" (dict "matchLabels" $selector) }}{{ end }}
    - {{ toYaml $constraint | nindent 6 | trim }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* Probes. Health decides readiness, never liveness: restarting an orchestrator brings no verifier back. Liveness
probes ask for the name `live`, which the event loop answers while it runs. The health port opens when the service has
loaded, and has no TLS, since probes do not support it. Takes a list: root, the workload. */}}
{{- define "specdec.probes" -}}
{{- $root := index . 0 }}{{ $w := index . 1 }}
{{- $service := get (dict "verifier" "Verifier" "draft" "Draft" "orchestrator" "Generation") $w.role }}
{{- $health := printf "grpc: {port: 8086, service: specdec.v2.%sService}" $service }}
{{- if eq $w.role "openai" }}
{{- $scheme := and (ne $root.Values.tls.mode "none") $w.https | ternary "HTTPS" "HTTP" }}
{{- $health = printf "httpGet: {path: /health, port: main, scheme: %s}" $scheme }}
{{- end -}}
startupProbe:
  {{- if has $w.role (list "verifier" "draft") }}
  {{ $health }}
  {{- else }}
  # Its health depends on other services, which take longer to start.
  tcpSocket: {port: main}
  {{- end }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add $w.startupSeconds 4) 5 }}
readinessProbe:
  {{ $health }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- if eq $w.role "openai" }}
  # Fails while the event loop is stuck; /health would report on the orchestrators instead.
  httpGet: {path: /metrics, port: metrics}
  {{- else }}
  grpc: {port: 8086, service: live}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* Whether a pod records forgotten tenants, in its folder of versions: "true" or nothing. Takes the workload. */}}
{{- define "specdec.recordsForgotten" -}}
{{- if and (dig "learnKeySecret" "name" "" .) (index .options "versions") }}true{{ end }}
{{- end }}

{{/* Volumes and their mount points, as YAML with the list `all` of {name, at, readOnly, source}. Takes a list: root,
the workload. */}}
{{- define "specdec.storage" -}}
{{- $root := index . 0 }}{{ $w := index . 1 }}
all:
  - {name: config, at: /etc/specdec/config, readOnly: true, source: {configMap: {name: {{ $w.name }}}}}
  - {name: tmp, at: /tmp, source: {emptyDir: {sizeLimit: {{ $w.tmpSize | quote }}}}}
  {{- if eq $w.role "orchestrator" }}
  # Mounted as folders, so that changes arrive: a file mounted by subPath never changes.
  - name: models-file
    at: /etc/specdec/models
    readOnly: true
    source: {configMap: {name: {{ include "specdec.name" (list $root "models" "") }}}}
  {{- with $root.Values.tenants.existingSecret }}
  - name: tenants
    at: /etc/specdec/tenants
    readOnly: true
    source: {secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
  {{- end }}
  {{- end }}
  {{- with dig "learnKeySecret" "name" "" $w }}
  - name: learn
    at: /etc/specdec/learn
    readOnly: true
    source: {secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
  {{- end }}
  {{- if ne $root.Values.tls.mode "none" }}
  - name: tls
    at: /etc/specdec/tls
    readOnly: true
    source: {secret: {secretName: {{ include "specdec.tlsSecret" (list $root $w.role) | quote }}, defaultMode: 0440}}
  {{- end }}
  {{- if and $w.modelVolume (ne $w.role "openai") }}
  {{- $readOnly := not (include "specdec.recordsForgotten" $w) }}
  - name: models
    at: /models
    readOnly: {{ $readOnly }}
    source:
      {{- with $w.modelVolume.persistentVolumeClaim }}
      persistentVolumeClaim: {claimName: {{ .claimName | quote }}, readOnly: {{ $readOnly }}}
      {{- end }}
      {{- with $w.modelVolume.image }}
      image:{{ toYaml . | nindent 8 }}
      {{- end }}
      {{- with $w.modelVolume.download }}
      emptyDir:{{ pick . "sizeLimit" | toYaml | nindent 8 }}
      {{- end }}
  {{- end }}
  {{- if dig "cache" "enabled" false $w }}
  - name: cache
    at: /var/cache/specdec
    source:
      {{- if $w.cache.persistentVolumeClaim }}
      persistentVolumeClaim: {claimName: {{ $w.cache.persistentVolumeClaim | quote }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $w.cache.sizeLimit | quote }}}
      {{- end }}
  {{- end }}
  {{- with $w.shmSize }}
  - {name: shm, at: /dev/shm, source: {emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}}}
  {{- end }}
{{- end }}
