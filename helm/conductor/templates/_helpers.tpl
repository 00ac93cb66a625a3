{{- define "conductor.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "conductor.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "conductor.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "conductor.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "conductor.selector" -}}
app.kubernetes.io/name: {{ include "conductor.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "conductor.labels" -}}
{{ include "conductor.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "conductor.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "conductor.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "conductor.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- /* Whether the process runs emulated engines of its own because nobody named others. */ -}}
{{- define "conductor.emulated" -}}
{{- $emulation := .Values.config.emulation | default dict -}}
{{- $discovery := .Values.config.discovery | default dict -}}
{{- $discovered := or $discovery.file $discovery.kubernetes (hasKey $discovery "registration") -}}
{{- if not (or .Values.config.instances .Values.secret.instancesKey $emulation.cluster $discovered) -}}
{{- required "config.instances is empty: list the engines there, or in a Secret with secret.instancesKey, or say in config.discovery where they are found" .Values.emulateWithoutInstances -}}
{{- end -}}
{{- end -}}

{{- /* "yes" where the process asks the API server for pods with the service account's token. */ -}}
{{- define "conductor.asksForPods" -}}
{{- $kubernetes := (.Values.config.discovery | default dict).kubernetes | default dict -}}
{{- if and $kubernetes.pods (not $kubernetes.kubeconfig) -}}yes{{- end -}}
{{- end -}}

{{- /* The file of `conductor serve --config`. Keys and tokens are refused: anybody who reads ConfigMaps would have them. */ -}}
{{- define "conductor.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if ($config.server | default dict).admin_token -}}
{{- fail "config.server.admin_token would be in a ConfigMap: put it into a Secret and name it with secret.name and secret.adminTokenKey" -}}
{{- end -}}
{{- if ($config.shared_state | default dict).url -}}
{{- fail "config.shared_state.url would be in a ConfigMap: put it into a Secret and name its key with sharedState.urlKey" -}}
{{- end -}}
{{- range $config.api_keys -}}
{{- if .key -}}
{{- fail (printf "config.api_keys: the key of %q would be in a ConfigMap: give key_env here and the variable in secret.env" .name) -}}
{{- end -}}
{{- end -}}
{{- range (($config.discovery | default dict).kubernetes | default dict).pods -}}
{{- if (.instance | default dict).api_key -}}
{{- fail (printf "config.discovery.kubernetes.pods: the api_key of %q would be in a ConfigMap: give the whole of discovery as JSON in the variable CONDUCTOR_DISCOVERY, with extraEnv from a Secret" .selector) -}}
{{- end -}}
{{- end -}}
{{- range $config.instances -}}
{{- if .api_key -}}
{{- fail (printf "config.instances: the api_key of %q would be in a ConfigMap: put the list of engines into a Secret, as JSON, and name it with secret.instancesKey" .id) -}}
{{- end -}}
{{- end -}}
{{- if and $config.instances .Values.secret.instancesKey -}}
{{- fail "config.instances and secret.instancesKey exclude each other: the Secret's list would hide the other" -}}
{{- end -}}
{{- with include "conductor.emulated" . -}}
{{- $_ := set $config "emulation" (merge (dict "cluster" .) ($config.emulation | default dict)) -}}
{{- end -}}
{{- if .Values.persistence.enabled -}}
{{- if $config.state_dir -}}
{{- fail "config.state_dir and persistence.enabled exclude each other: the volume is at persistence.mountPath" -}}
{{- end -}}
{{- $_ := set $config "state_dir" .Values.persistence.mountPath -}}
{{- end -}}
{{- with .Values.endpointPicker -}}
{{- if .enabled -}}
{{- if $config.endpoint_picker -}}
{{- fail "config.endpoint_picker and endpointPicker.enabled exclude each other: set the port with endpointPicker.port" -}}
{{- end -}}
{{- $picker := dict "host" "0.0.0.0" "port" .port -}}
{{- if .selfSigned -}}
{{- $_ := set $picker "tls" "self_signed" -}}
{{- end -}}
{{- $_ := set $config "endpoint_picker" $picker -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "conductor.redis" -}}
{{- printf "%s-redis" (include "conductor.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{- /* Not those of the selector: its Service must not find Redis. */ -}}
{{- define "conductor.redisLabels" -}}
app.kubernetes.io/name: {{ include "conductor.name" . }}-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Variables that lead to Redis; one is made of an earlier one, as Kubernetes does. */ -}}
{{- define "conductor.sharedState" -}}
{{- $shared := .Values.sharedState -}}
{{- if and $shared.redis.enabled (not $shared.enabled) -}}
{{- fail "sharedState.redis.enabled needs sharedState.enabled" -}}
{{- end -}}
{{- if $shared.enabled -}}
{{- if not .Values.secret.name -}}
{{- fail "sharedState.enabled needs secret.name: the Secret holds Redis' URL (sharedState.urlKey) or password (sharedState.redis.passwordKey)" -}}
{{- end -}}
{{- if not .Values.secret.adminTokenKey -}}
{{- fail "sharedState.enabled needs secret.adminTokenKey: replicas ask each other for the index with that token" -}}
{{- end -}}
{{- if eq (empty $shared.urlKey) (not $shared.redis.enabled) -}}
{{- fail "sharedState needs either urlKey, for a Redis that is there, or redis.enabled" -}}
{{- end -}}
{{- if $shared.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: {{ required "sharedState.redis.passwordKey is required: the key of the Secret with Redis' password" $shared.redis.passwordKey }}
- name: CONDUCTOR_SHARED_STATE__URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "conductor.redis" . }}:6379/0
{{- else }}
- name: CONDUCTOR_SHARED_STATE__URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret.name }}
      key: {{ $shared.urlKey }}
{{- end }}
- name: CONDUCTOR_SHARED_STATE__NAMESPACE
  value: {{ (.Values.config.shared_state | default dict).namespace | default (printf "%s.%s" .Release.Namespace (include "conductor.fullname" .) | trunc 64) }}
- name: CONDUCTOR_SHARED_STATE__REPLICA
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: CONDUCTOR_SHARED_STATE__ADVERTISE_URL
  value: {{ include "conductor.scheme" . }}://$(POD_IP):{{ include "conductor.port" . }}
{{- end -}}
{{- end -}}

{{- define "conductor.port" -}}
{{- (.Values.config.server | default dict).port | default 8000 -}}
{{- end -}}

{{- define "conductor.scheme" -}}
{{- if (.Values.config.server | default dict).tls -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- /* How a probe asks. The kubelet has no client certificate: where one is needed it can only connect. */ -}}
{{- define "conductor.ask" -}}
{{- $tls := (.root.Values.config.server | default dict).tls | default dict -}}
{{- if $tls.client_ca -}}
tcpSocket:
  port: http
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ include "conductor.scheme" .root | upper }}
{{- end -}}
{{- end -}}

{{- /* Series of this release, as the ServiceMonitor labels them. */ -}}
{{- define "conductor.series" -}}
namespace="{{ .Release.Namespace }}",job="{{ include "conductor.fullname" . }}"
{{- end -}}
