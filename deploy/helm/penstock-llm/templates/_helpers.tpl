{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-penstock" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "penstock.metadata" -}}
name: {{ include "penstock.name" . }}
labels:
  app: {{ include "penstock.name" . }}
  app.kubernetes.io/name: penstock
  app.kubernetes.io/instance: {{ .Release.Name }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "penstock.selector" -}}
app: {{ include "penstock.name" . }}
{{- end }}

{{- define "penstock.image" -}}
{{- $target := ternary "plain" "gpu" (not (empty .Values.engines)) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $target) }}
{{- end }}
