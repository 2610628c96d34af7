{{/* Refuses inconsistent values, with a one-line error that names the value. values.schema.json checks each value by
itself. Takes a list: root, the workloads. */}}
{{- define "specdec.checks" -}}
{{- $root := index . 0 }}
{{- $values := $root.Values }}
{{- $base := default $root.Release.Name $values.fullnameOverride }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $base) }}
{{- fail (printf "fullnameOverride: %s must be a letter, then letters, digits and hyphens, as names of Services" $base) }}
{{- end }}
{{- include "specdec.checkModels" $values }}
{{- include "specdec.checkModelVolume" (list "modelVolume" $values.modelVolume) }}
{{- range index . 1 }}{{ include "specdec.checkWorkload" (list $values .) }}{{ end }}
{{- range $name, $job := $values.exportJobs }}
{{- if not (default $values.modelVolume $job.modelVolume).persistentVolumeClaim }}
{{- fail (printf "exportJobs.%s: writes into a volume, so modelVolume should be a persistentVolumeClaim" $name) }}
{{- end }}
{{- include "specdec.checkMemory" (list (printf "exportJobs.%s" $name) $job.resources $job.modelGiB) }}
{{- include "specdec.checkPath" (list (printf "exportJobs.%s.model" $name) $job.model) }}
{{- end }}
{{- include "specdec.checkTls" $values }}
{{- include "specdec.checkRoutes" $values }}
{{- end }}

{{/* Checks the models, their revisions and their pools. Takes the values. */}}
{{- define "specdec.checkModels" -}}
{{- $all := . }}
{{- if not (or .models (include "specdec.draftsAlone" .)) }}
{{- fail "models: is empty, should name a model, its revisions and their pools" }}
{{- end }}
{{- $directories := dict }}
{{- range $model, $given := .models }}
{{- $shared := false }}
{{- range $revision, $values := $given.revisions }}
{{- $at := printf "models.%s.revisions.%s" $model $revision }}
{{- include "specdec.checkPath" (list (printf "%s.path" $at) $values.path) }}
{{- if gt (include "specdec.share" $values | float64) 0.0 }}{{ $shared = true }}{{ end }}
{{- range $pools := list "verifiers" "drafts" }}
{{- range $pool := index $values $pools }}
{{- if not (hasKey (index $all $pools) $pool) }}
{{- fail (printf "%s.%s: there is no pool %s.%s" $at $pools $pools $pool) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $pool := $values.verifiers }}
{{- $before := get $directories $pool }}
{{- if and $before (ne $before $values.path) }}
{{- fail (printf "%s.verifiers: pool %s serves %s for another revision already" $at $pool $before) }}
{{- end }}
{{- $_ := set $directories $pool $values.path }}
{{- $named := get $all.verifiers $pool }}
{{- if and $named.model (or (ne $named.model $model) (ne (default "" $named.revision) $revision)) }}
{{- $named = printf "models.%s.revisions.%s" $named.model (default "" $named.revision) }}
{{- fail (printf "%s.verifiers: pool %s serves %s, as verifiers.%s says" $at $pool $named $pool) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $shared }}{{ fail (printf "models.%s.revisions: all have a share of 0" $model) }}{{ end }}
{{- end }}
{{- end }}

{{/* Checks that a model is not a GGUF file: pods have no writable folder for its conversion. Takes a list: the path of
the values, for errors; the model's path. */}}
{{- define "specdec.checkPath" -}}
{{- if regexMatch "(?i)[.]gguf$" (index . 1) }}
{{- fail (printf "%s: is a GGUF file, should be a directory made from it by `specdec import-gguf`" (index . 0)) }}
{{- end }}
{{- end }}

{{/* Checks one workload. Takes a list: the values, the workload. */}}
{{- define "specdec.checkWorkload" -}}
{{- $values := index . 0 }}{{ $w := index . 1 }}
{{- if eq $w.role "verifier" }}
{{- if and $w.path $w.model }}{{ fail (printf "%s: has path and model, should have one of them" $w.key) }}{{ end }}
{{- if not (or $w.path $w.model) }}{{ fail (printf "%s: should have model and revision, or path" $w.key) }}{{ end }}
{{- if and $w.model (not $w.revision) }}{{ fail (printf "%s.revision: is missing" $w.key) }}{{ end }}
{{- if not $w.directory }}
{{- fail (printf "%s: there is no models.%s.revisions.%s" $w.key $w.model $w.revision) }}
{{- end }}
{{- if $w.onVllm }}{{ include "specdec.checkOnVllm" $w }}{{ end }}
{{- if and (gt (int $w.gpus) 1) (not $w.onVllm) }}
{{- fail (printf "%s.gpus: is %d, and a target on several GPUs is for options.engine vllm" $w.key (int $w.gpus)) }}
{{- end }}
{{- if and $w.options.compile (not $w.onVllm) }}
{{- fail (printf "%s.options.compile: is %v, and is for options.engine vllm" $w.key $w.options.compile) }}
{{- end }}
{{- end }}
{{- if and (eq $w.role "draft") (not $w.path) }}{{ fail (printf "%s.path: is missing" $w.key) }}{{ end }}
{{- if and (index $w.options "learn-tokens") (not (dig "learnKeySecret" "name" "" $w)) }}
{{- fail (printf "%s.learnKeySecret.name: is missing, and options.learn-tokens is %v" $w.key (index $w.options "learn-tokens")) }}
{{- end }}
{{- if include "specdec.recordsForgotten" $w }}
{{- if not (dig "persistentVolumeClaim" "claimName" "" $w.modelVolume) }}
{{- fail (printf "%s.options.versions: needs a persistentVolumeClaim as modelVolume, where `specdec forget` is recorded" $w.key) }}
{{- end }}
{{- end }}
{{- if and (eq $w.role "draft") (gt (int $w.gpus) 1) }}
{{- fail (printf "%s.gpus: is %d, and a draft runs on one" $w.key (int $w.gpus)) }}
{{- end }}
{{- include "specdec.checkPath" (list (printf "%s.path" $w.key) (default "" $w.path)) }}
{{- $collector := index $w.options "otlp-endpoint" | default "" | toString }}
{{- if regexMatch "^https?://" $collector }}
{{- fail (printf "%s.options.otlp-endpoint: is %s, should be HOST:PORT" $w.key $collector) }}
{{- end }}
{{- if and $w.gpus (eq (toString $w.options.device) "cpu") }}
{{- fail (printf "%s.options.device: is cpu, and %s.gpus is %d" $w.key $w.key (int $w.gpus)) }}
{{- end }}
{{- with $w.autoscaling }}
{{- if ne .type "none" }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- $found := printf "is %d, and maxReplicas is %d" (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas: %s" $w.key $found) }}
{{- end }}
{{- if not .targets }}{{ fail (printf "%s.autoscaling.targets: is empty" $w.key) }}{{ end }}
{{- range $metric, $_ := .targets }}
{{- if and (ne $metric "cpu") (not (hasPrefix (printf "specdec_%s_" $w.role) $metric)) }}
{{- fail (printf "%s.autoscaling.targets: %s is no metric of this role" $w.key $metric) }}
{{- end }}
{{- end }}
{{- if and .targets.cpu (not (include "specdec.resources" $w | fromYaml | dig "requests" "cpu" "")) }}
{{- fail (printf "%s.autoscaling.targets.cpu: is a part of resources.requests.cpu, which is missing" $w.key) }}
{{- end }}
{{- if and (eq .type "keda") (not $values.prometheusAddress) }}
{{- fail (printf "%s.autoscaling.type: is keda, and prometheusAddress is empty" $w.key) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "specdec.checkModelVolume" (list (printf "%s.modelVolume" $w.key) $w.modelVolume) }}
{{- include "specdec.checkImage" (list $w.key $w.image) }}
{{- if has $w.role (list "verifier" "draft") }}
{{- include "specdec.checkMemory" (list $w.key $w.resources $w.modelGiB) }}
{{- end }}
{{- $downloads := and $w.modelVolume.download (ne $w.role "openai") }}
{{- if and $downloads $values.networkPolicy.enabled (not $values.networkPolicy.modelSources) }}
{{- fail (printf "networkPolicy.modelSources: is empty, and %s downloads its model" $w.key) }}
{{- end }}
{{- end }}

{{/* Checks that an image has a registry: without one, a container engine would pull a stranger's image of that name.
Takes a list: the path of the values, for errors; the values of `image`. */}}
{{- define "specdec.checkImage" -}}
{{- $image := index . 1 }}
{{- if not (or $image.registry (include "specdec.namesRegistry" $image.repository)) }}
{{- fail (printf "%s.image.registry: is empty, should name the registry with your images (for all: defaults.image.registry)" (index . 0)) }}
{{- end }}
{{- end }}

{{/* Checks a verifier whose model vLLM runs. Takes the workload. */}}
{{- define "specdec.checkOnVllm" -}}
{{- $at := printf "%s.options.vllm-options" .key }}
{{- $passed := default "{}" (index .options "vllm-options") | fromJson }}
{{- if hasKey $passed "Error" }}{{ fail (printf "%s: is no JSON object: %s" $at $passed.Error) }}{{ end }}
{{- $size := dig "tensor_parallel_size" (max 1 (int .gpus)) $passed | int }}
{{- if and .gpus (ne $size (int .gpus)) }}
{{- fail (printf "%s: tensor_parallel_size is %d, and %s.gpus is %d" $at $size .key (int .gpus)) }}
{{- end }}
{{- end }}

{{/* Checks a volume of models. Takes a list: the path of its values, for errors; the values. */}}
{{- define "specdec.checkModelVolume" -}}
{{- if gt (len (index . 1)) 1 }}
{{- fail (printf "%s: has %s, should have one of them" (index . 0) (keys (index . 1) | sortAlpha | join " and ")) }}
{{- end }}
{{- with (index . 1).download }}
{{- if not .sizeLimit }}{{ fail (printf "%s.download.sizeLimit: is missing" (index $ 0)) }}{{ end }}
{{- end }}
{{- end }}

{{/* Checks that all certificates and client names are given. Takes the values. */}}
{{- define "specdec.checkTls" -}}
{{- $values := . }}
{{- $alone := include "specdec.draftsAlone" . }}
{{- if eq .tls.mode "secrets" }}
{{- range $role := list "verifier" "draft" "orchestrator" "openai" }}
{{- $unused := dict "draft" (empty $values.drafts) "openai" (not $values.openai.enabled) }}
{{- if not (or (and $alone (ne $role "draft")) (get $unused $role) (get $values.tls.secrets $role)) }}
{{- fail (printf "tls.secrets.%s: is empty, and tls.mode is secrets" $role) }}
{{- end }}
{{- end }}
{{- else if and (eq .tls.mode "certManager") (not .tls.issuer.name) }}
{{- fail "tls.issuer.name: is empty, and tls.mode is certManager" }}
{{- end }}
{{- if eq .tls.mode "none" }}
{{- range $name, $given := omit .tls "mode" "duration" "renewBefore" "issuer" "secrets" }}
{{- if $given }}{{ fail (printf "tls.%s: is set, and tls.mode is none" $name) }}{{ end }}
{{- end }}
{{- if .tls.issuer.name }}{{ fail "tls.issuer.name: is set, and tls.mode is none" }}{{ end }}
{{- range $role, $secret := .tls.secrets }}
{{- if $secret }}{{ fail (printf "tls.secrets.%s: is set, and tls.mode is none" $role) }}{{ end }}
{{- end }}
{{- end }}
{{- if and (ne .tls.mode "none") (not .tls.draftClientNames) (or $alone .networkPolicy.draftClients) }}
{{- fail "tls.draftClientNames: is empty, and drafts serve those whose certificates have one of these names" }}
{{- end }}
{{- end }}

{{/* Checks that routes from outside lead to services that exist and may be called. Takes the values. */}}
{{- define "specdec.checkRoutes" -}}
{{- $openai := .openai }}
{{- if include "specdec.draftsAlone" . }}
{{- if $openai.enabled }}{{ fail "openai.enabled: is true, and models is empty" }}{{ end }}
{{- if .orchestrator.grpcRoute.enabled }}
{{- fail "orchestrator.grpcRoute: leads to orchestrators, and without models there are none" }}
{{- end }}
{{- if and .networkPolicy.enabled (not .networkPolicy.draftClients) }}
{{- fail "networkPolicy.draftClients: is empty, and without models nobody else may call the drafts" }}
{{- end }}
{{- end }}
{{- $outside := and .models .networkPolicy.enabled (ne .orchestrator.service.type "ClusterIP") }}
{{- range $peer := .networkPolicy.clients }}
{{- if $peer.ipBlock }}{{ $outside = false }}{{ end }}
{{- end }}
{{- if $outside }}
{{- $type := .orchestrator.service.type }}
{{- fail (printf "orchestrator.service.type: is %s, and networkPolicy.clients lets nobody in from outside: add an ipBlock" $type) }}
{{- end }}
{{- range $route := list "ingress" "httpRoute" }}
{{- if and (get $openai $route).enabled (not $openai.enabled) }}
{{- fail (printf "openai.%s: leads to openai, and openai.enabled is false" $route) }}
{{- end }}
{{- end }}
{{- if and .openai.ingress.enabled (not .openai.ingress.hosts) }}{{ fail "openai.ingress.hosts: is empty" }}{{ end }}
{{- range $at, $route := dict "orchestrator.grpcRoute" .orchestrator.grpcRoute "openai.httpRoute" .openai.httpRoute }}
{{- if and $route.enabled (not $route.parentRefs) }}
{{- fail (printf "%s.parentRefs: is empty, should name a Gateway" $at) }}
{{- end }}
{{- end }}
{{- end }}
