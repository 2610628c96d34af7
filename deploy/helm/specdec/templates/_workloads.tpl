{{/* Workloads: the values of each pool, of the orchestrator and of openai, in one form. */}}

{{/* All workloads, as YAML with the list `all`. Fails if values are inconsistent. */}}
{{- define "specdec.workloads" -}}
{{- $root := . }}
{{- $all := list }}
{{- range $role, $pools := dict "verifier" .Values.verifiers "draft" .Values.drafts }}
{{- range $pool, $given := $pools }}
{{- $layers := list (get $root.Values (printf "%sDefaults" $role)) $given }}
{{- $taken := dict "root" $root "role" $role "pool" $pool "key" (printf "%ss.%s" $role $pool) "layers" $layers }}
{{- $all = append $all (include "specdec.workload" $taken | fromYaml) }}
{{- end }}
{{- end }}
{{- range $role := list "orchestrator" "openai" }}
{{- $given := get $root.Values $role }}
{{- if eq $role "openai" | ternary $given.enabled (not (include "specdec.draftsAlone" $root.Values)) }}
{{- $taken := dict "root" $root "role" $role "pool" "" "key" $role "layers" (list $given) }}
{{- $all = append $all (include "specdec.workload" $taken | fromYaml) }}
{{- end }}
{{- end }}
{{- include "specdec.checks" (list . $all) }}
{{- toYaml (dict "all" $all) }}
{{- end }}

{{/* Whether only drafts are installed, for callers without an orchestrator: "true" or nothing. Takes the values. */}}
{{- define "specdec.draftsAlone" -}}
{{- if and .drafts (not .verifiers) (not .models) }}true{{ end }}
{{- end }}

{{/* One workload as YAML: its values, laid over their defaults, and these:

    role, pool, name    its role, its pool, and the name of its objects
    key                 the path of its values, for errors
    directory           the directory of its model
    onVllm              whether vLLM runs its model; vLLM then manages the GPUs of a pod

Takes a dict: root, role, pool, key, layers (lowest first). */}}
{{- define "specdec.workload" -}}
{{- $w := deepCopy .root.Values.defaults }}
{{- $_ := set $w "modelVolume" .root.Values.modelVolume }}
{{- /* Not in values.yaml: Helm would merge the targets of values into them. */}}
{{- $waiting := dict "specdec_verifier_num_requests_waiting" 1 "specdec_verifier_kv_cache_usage_perc" 0.8 }}
{{- with get (dict "verifier" $waiting "draft" (dict "specdec_draft_num_sessions" 64)) .role }}
{{- $_ := set $w.autoscaling "targets" . }}
{{- end }}
{{- range .layers }}{{ include "specdec.lay" (list $w (deepCopy .)) }}{{ end }}
{{- include "specdec.lay" (list $w (pick . "role" "pool" "key")) }}
{{- $_ := set $w "name" (include "specdec.name" (list .root .role .pool)) }}
{{- $_ := set $w "directory" (default "" $w.path) }}
{{- if and $w.model (not $w.path) }}
{{- $_ := set $w "directory" (dig $w.model "revisions" (default "" $w.revision) "path" "" .root.Values.models) }}
{{- end }}
{{- $_ := set $w "onVllm" (eq (toString $w.options.engine) "vllm") }}
{{- toYaml $w }}
{{- end }}

{{/* Lays values over others, in place. Takes a list: the lower values, the upper ones. Unlike mergeOverwrite, it also
takes empty and false values. */}}
{{- define "specdec.lay" -}}
{{- $below := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- $whole := has $key (list "targets" "modelVolume") }}
{{- if and (kindIs "map" $value) (kindIs "map" (get $below $key)) (not $whole) }}
{{- include "specdec.lay" (list (get $below $key) $value) }}
{{- else if not (and (eq $key "modelVolume") (empty $value)) }}
{{- $_ := set $below $key $value }}
{{- end }}
{{- end }}
{{- end }}
