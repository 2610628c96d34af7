{{/* Names, labels, addresses, ports and images. */}}

{{/* The name of an object, RELEASE-WORD or RELEASE-WORD-POOL. Takes a list: root, the word, the pool or "". Names have
40 characters at most, since controllers append to them; longer ones are cut and end with a digest. */}}
{{- define "specdec.name" -}}
{{- $root := index . 0 }}
{{- $name := printf "%s-%s" (default $root.Release.Name $root.Values.fullnameOverride) (index . 1) }}
{{- with index . 2 }}{{ $name = printf "%s-%s" $name . }}{{ end }}
{{- if gt (len $name) 40 }}
{{- $name = printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* The labels that select pods; they never change. Takes a list: root, component, pool or "". */}}
{{- define "specdec.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: specdec
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- with index . 2 }}
specdec/pool: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The metadata of an object, with all labels. Takes a list: root, name, component, pool or "". */}}
{{- define "specdec.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "specdec.selector" (list $root (index . 2) (index . 3)) | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/part-of: specdec
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The DNS name of a Service. Takes the arguments of "specdec.name". The orchestrator has two Services; the pool
"pods" selects the headless one. */}}
{{- define "specdec.host" -}}
{{- $root := index . 0 -}}
{{ include "specdec.name" . }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end }}

{{/* The address of all pods behind a Service. Takes the arguments of "specdec.name", with a role as the word. */}}
{{- define "specdec.address" -}}
dns:///{{ include "specdec.host" . }}:{{ include "specdec.port" (index . 1) }}
{{- end }}

{{/* The port of a role, as in specdec/ports.py. */}}
{{- define "specdec.port" -}}
{{ get (dict "verifier" 50051 "draft" 50052 "orchestrator" 50050 "openai" 8000) . }}
{{- end }}

{{/* An image. Takes a list: root, the values of `image`, the number of GPUs. */}}
{{- define "specdec.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 }}
{{- $repository := $image.repository }}
{{- if not (include "specdec.namesRegistry" $repository) }}
{{- $repository = printf "%s/%s" (trimSuffix "/" $image.registry) $repository }}
{{- end }}
{{- $tag := default $root.Chart.AppVersion $image.tag }}
{{- if $image.digest -}}
{{ $repository }}@{{ $image.digest }}
{{- else -}}
{{ $repository }}:{{ $tag }}{{ or (index . 2 | empty) (hasSuffix $image.cudaSuffix $tag) | ternary "" $image.cudaSuffix }}
{{- end }}
{{- end }}

{{/* Whether an image name begins with a registry, by the rule of container engines: "true" or nothing. */}}
{{- define "specdec.namesRegistry" -}}
{{- $first := splitList "/" . | first }}
{{- if and (contains "/" .) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) }}true{{ end }}
{{- end }}
