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
