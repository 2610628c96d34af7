{{/* Configuration: the file of models, and a file of options for each workload. */}}

{{/* The file of models for the orchestrator: each revision with the headless Services of its pools. */}}
{{- define "specdec.models" -}}
{{- $root := . }}
{{- $models := dict }}
{{- range $model, $given := .Values.models }}
{{- $revisions := dict }}
{{- range $revision, $values := $given.revisions }}
{{- $entry := dict "directory" $values.path "share" (include "specdec.share" $values | float64) }}
{{- with $values.chatTemplate }}{{ $_ := set $entry "chat_template" . }}{{ end }}
{{- range $role := list "verifier" "draft" }}
{{- $addresses := list }}
{{- range index $values (printf "%ss" $role) }}
{{- $addresses = append $addresses (include "specdec.address" (list $root $role .)) }}
{{- end }}
{{- if $addresses }}{{ $_ := set $entry (printf "%ss" $role) $addresses }}{{ end }}
{{- end }}
{{- $_ := set $revisions $revision $entry }}
{{- end }}
{{- $_ := set $models $model (dict "revisions" $revisions) }}
{{- end }}
{{- toYaml (dict "models" $models) }}
{{- end }}

{{/* The share of a revision. Takes its values. */}}
{{- define "specdec.share" -}}
{{ hasKey . "share" | ternary .share 1 }}
{{- end }}

{{/* The file of options of a workload. Takes a list: root, the workload. */}}
{{- define "specdec.options" -}}
{{- $root := index . 0 }}{{ $w := index . 1 }}
{{- $own := dict "host" "0.0.0.0" "port" (include "specdec.port" $w.role | int) "metrics-port" 9090 }}
{{- $_ := set $own "drain-seconds" $w.drainSeconds }}
{{- if eq $w.role "openai" }}
{{- $_ := set $own "orchestrator" (list (include "specdec.address" (list $root "orchestrator" "pods"))) }}
{{- /* A pod would not find responses stored by another. */}}
{{- $alone := and (eq $w.autoscaling.type "none") (le (int $w.replicas) 1) }}
{{- if not (or $alone (hasKey $w.options "response-store")) }}{{ $_ := set $own "response-store" "off" }}{{ end }}
{{- else }}
{{- $_ := set $own "health-port" 8086 }}
{{- end }}
{{- if eq $w.role "orchestrator" }}
{{- $_ := set $own "models" "/etc/specdec/models/models.yaml" }}
{{- if $root.Values.tenants.existingSecret }}
{{- $_ := set $own "tenants" (printf "/etc/specdec/tenants/%s" $root.Values.tenants.key) }}
{{- end }}
{{- end }}
{{- if has $w.role (list "verifier" "draft") }}
{{- $_ := set $own "model" $w.directory }}
{{- if and $w.gpus (not $w.options.device) }}{{ $_ := set $own "device" "cuda" }}{{ end }}
{{- end }}
{{- if dig "learnKeySecret" "name" "" $w }}
{{- $_ := set $own "learn-key-file" (printf "/etc/specdec/learn/%s" $w.learnKeySecret.key) }}
{{- end }}
{{- if and $w.onVllm (gt (int $w.gpus) 1) }}
{{- $passed := dict "tensor_parallel_size" (int $w.gpus) }}
{{- include "specdec.lay" (list $passed (default "{}" (index $w.options "vllm-options") | fromJson)) }}
{{- $_ := set $own "vllm-options" (toJson $passed) }}
{{- end }}
{{- if ne $root.Values.tls.mode "none" }}{{ include "specdec.tlsOptions" (list $root $w $own) }}{{ end }}
{{- $options := deepCopy $w.options }}
{{- include "specdec.lay" (list $options $own) }}
{{- toYaml $options }}
{{- end }}

{{/* Adds the options of TLS to others. Takes a list: root, the workload, the options. */}}
{{- define "specdec.tlsOptions" -}}
{{- $root := index . 0 }}{{ $w := index . 1 }}{{ $options := index . 2 }}
{{- $cert := "/etc/specdec/tls/tls.crt" }}{{ $key := "/etc/specdec/tls/tls.key" }}{{ $ca := "/etc/specdec/tls/ca.crt" }}
{{- /* Prefix of the options for its own calls; verifiers and drafts make none. */}}
{{- $towards := get (dict "orchestrator" "peer" "openai" "orchestrator") $w.role }}
{{- with $towards }}
{{- $_ := set $options (printf "%s-tls-ca" .) $ca }}
{{- $_ := set $options (printf "%s-tls-cert" .) $cert }}
{{- $_ := set $options (printf "%s-tls-key" .) $key }}
{{- end }}
{{- if or (ne $w.role "openai") $w.https }}
{{- $_ := set $options "tls-cert" $cert }}
{{- $_ := set $options "tls-key" $key }}
{{- end }}
{{- if or (not $towards) (and (eq $w.role "orchestrator") $root.Values.tls.requireClientCertificates) }}
{{- $_ := set $options "tls-client-ca" $ca }}
{{- end }}
{{- if not $towards }}
{{- $names := list (default (include "specdec.host" (list $root "orchestrator" "")) $root.Values.tls.clientName) }}
{{- if include "specdec.draftsAlone" $root.Values }}{{ $names = list }}{{ end }}
{{- if eq $w.role "draft" }}{{ $names = concat $names $root.Values.tls.draftClientNames }}{{ end }}
{{- $_ := set $options "tls-client-name" $names }}
{{- end }}
{{- end }}

{{/* The Secret with a role's certificate. Takes a list: root, role. */}}
{{- define "specdec.tlsSecret" -}}
{{- $root := index . 0 }}
{{- if eq $root.Values.tls.mode "secrets" }}
{{- get $root.Values.tls.secrets (index . 1) }}
{{- else }}
{{- include "specdec.name" (list $root (index . 1) "tls") }}
{{- end }}
{{- end }}
