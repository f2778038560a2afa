{{- define "pdproxy.selector" -}}
app.kubernetes.io/name: pdproxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pdproxy.labels" -}}
{{ include "pdproxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "pdproxy.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}

{{- define "pdproxy.coordinator" -}}
{{- if eq .Values.coordinator "kubernetes" -}}
kubernetes:///{{ include "pdproxy.name" . }}
{{- else if .Values.coordinator -}}
{{ .Values.coordinator }}
{{- else if .Values.redis.enabled -}}
redis://{{ include "pdproxy.name" . }}-redis:6379
{{- else if gt (int .Values.replicas) 1 -}}
{{- fail "coordinator: needed for more than one replica, because redis.enabled is false" -}}
{{- end -}}
{{- end -}}

{{/* Instances' worth of pages, held and waited for, of one role. */}}
{{- define "pdproxy.pages" -}}
sum(
  (max by (job, exported_instance) (pdproxy_slots_held) + max by (job, exported_instance) (pdproxy_queue_pages))
  / (max by (job, exported_instance) (pdproxy_slots_capacity) < +Inf > 0)
  and on (job, exported_instance) pdproxy_instance_ready{role="{{ . }}"}
) or vector(0)
{{- end -}}
