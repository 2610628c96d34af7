{{/* Resources of pods: memory by the size of their model, disk by the folders that they write to, cores by role. */}}

{{/* A Kubernetes quantity in MiB, rounded up. Takes the quantity. */}}
{{- define "specdec.mib" -}}
{{- $number := regexFind "^[0-9.]+" (toString .) }}
{{- $unit := trimPrefix $number (toString .) }}
{{- $bytes := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 }}
{{- $_ := merge $bytes (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) }}
{{- divf (mulf (float64 $number) (float64 (get $bytes $unit))) 1048576.0 | ceil | int64 }}
{{- end }}

{{/* Memory in MiB of a process with a model: the GiB of its weights times a factor, and 4 GiB for Python, torch,
compiled code and buffers of a step. Takes a list: the GiB, the factor. */}}
{{- define "specdec.memoryFor" -}}
{{- add (mulf 1024.0 (float64 (index . 0)) (float64 (index . 1)) | ceil | int64) 4096 }}
{{- end }}

{{/* The resources of a workload's container, as YAML: its values, laid over computed ones. A verifier or draft gets 1.5
times the size of its weights, for keys and values and for temporary memory at start. Takes the workload. */}}
{{- define "specdec.resources" -}}
{{- $w := . }}
{{- $resources := dict "requests" dict "limits" dict }}
{{- /* Without a request, other pods of the node could take nearly all of its cores. */}}
{{- $cores := dict "verifier" "2" "draft" "1" "orchestrator" "1" "openai" "250m" }}
{{- $_ := set $resources.requests "cpu" (get $cores $w.role) }}
{{- with get (dict "orchestrator" (list "1Gi" "2Gi") "openai" (list "256Mi" "1Gi")) $w.role }}
{{- $_ := set $resources.requests "memory" (index . 0) }}
{{- $_ := set $resources.limits "memory" (index . 1) }}
{{- end }}
{{- if $w.modelGiB }}
{{- $memory := include "specdec.memoryFor" (list $w.modelGiB 1.5) | int64 }}
{{- with $w.shmSize }}{{ $memory = add $memory (include "specdec.mib" . | int64) }}{{ end }}
{{- range $part := list "requests" "limits" }}
{{- $_ := set (get $resources $part) "memory" (printf "%dMi" $memory) }}
{{- end }}
{{- end }}
{{- /* For logs and the rest that the kubelet counts, and for each folder on the node's disk. */}}
{{- $disk := add 1024 (include "specdec.mib" $w.tmpSize | int64) }}
{{- if and (dig "cache" "enabled" false $w) (not $w.cache.persistentVolumeClaim) }}
{{- $disk = add $disk (include "specdec.mib" $w.cache.sizeLimit | int64) }}
{{- end }}
{{- if ne $w.role "openai" }}
{{- with dig "download" "sizeLimit" "" $w.modelVolume }}
{{- $disk = add $disk (include "specdec.mib" . | int64) }}
{{- end }}
{{- end }}
{{- range $part := list "requests" "limits" }}
{{- $_ := set (get $resources $part) "ephemeral-storage" (printf "%dMi" $disk) }}
{{- end }}
{{- include "specdec.layResources" (list $resources $w.resources) }}
{{- if $w.gpus }}{{ include "specdec.lay" (list $resources (dict "limits" (dict "nvidia.com/gpu" (int $w.gpus)))) }}{{ end }}
{{- toYaml $resources }}
{{- end }}

{{/* Lays the resources of values over computed ones, in place. If values name only the request of a resource, or only its
limit, the computed other part follows: Kubernetes refuses a request above its limit. Takes a list: the computed
resources, those of the values. */}}
{{- define "specdec.layResources" -}}
{{- $computed := index . 0 }}{{ $given := deepCopy (index . 1) }}
{{- range $part, $other := dict "requests" "limits" "limits" "requests" }}
{{- range $name := keys (dig $part dict $computed) }}
{{- with dig $other $name "" $given }}{{ $_ := set (get $computed $part) $name . }}{{ end }}
{{- end }}
{{- end }}
{{- include "specdec.lay" (list $computed $given) }}
{{- end }}

{{/* The resources of a Job that exports a draft: it holds the weights, the traced model and its graph. Takes the Job's
values. */}}
{{- define "specdec.exportResources" -}}
{{- $resources := dict "requests" (dict "cpu" "1" "ephemeral-storage" "3Gi") "limits" (dict "ephemeral-storage" "3Gi") }}
{{- if .modelGiB }}
{{- range $part := list "requests" "limits" }}
{{- $_ := set (get $resources $part) "memory" (printf "%dMi" (include "specdec.memoryFor" (list $.modelGiB 4) | int64)) }}
{{- end }}
{{- end }}
{{- include "specdec.layResources" (list $resources (default dict .resources)) }}
{{- toYaml $resources }}
{{- end }}

{{/* Checks that the memory of a model has a limit. Takes a list: the path of the values, for errors; their resources;
their modelGiB. */}}
{{- define "specdec.checkMemory" -}}
{{- if not (or (dig "limits" "memory" "" (default dict (index . 1))) (index . 2)) }}
{{- $problem := "is missing: give the GiB of its weights in their dtype, or resources.limits.memory" }}
{{- fail (printf "%s.modelGiB: %s" (index . 0) $problem) }}
{{- end }}
{{- end }}
