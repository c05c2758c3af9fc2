{{/* A service's helpers take a component: (dict "root" $ "service" "driver" "values" .Values.driver "port" 7702 "metrics" 7712). */}}

{{/* A pod's name is its service's name in ids, which has at most 32 characters: 15, `-interception-` and three digits. */}}
{{- define "penstock.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-penstock" .Release.Name) (contains "penstock" .Release.Name) -}}
{{- if gt (len $name) 15 }}
{{- fail (printf "%s is longer than 15 characters: the release's name has at most 6, or 15 with `penstock` in it" $name) }}
{{- end }}
{{- $name -}}
{{- end }}

{{- define "penstock.name" -}}
{{ include "penstock.fullname" .root }}-{{ .service }}
{{- end }}

{{- define "penstock.namespace" -}}
{{- if eq .service "sandbox" }}{{ .root.Values.sandbox.namespace | default .root.Release.Namespace }}{{ else }}{{ .root.Release.Namespace }}{{ end -}}
{{- end }}

{{/* Where the backend kubernetes claims its sandboxes. */}}
{{- define "penstock.claimsNamespace" -}}
{{ .Values.sandbox.kubernetes.namespace | default (include "penstock.namespace" (dict "root" . "service" "sandbox")) }}
{{- end }}

{{/* Whether a service asks the API server for anything: the sandbox service, where sandboxes are pods of the cluster. */}}
{{- define "penstock.asksCluster" -}}
{{- if and (eq .service "sandbox") (eq .root.Values.sandbox.backend "kubernetes") }}true{{ end -}}
{{- end }}

{{/* The name of the headless Service, which certificates have. */}}
{{- define "penstock.host" -}}
{{ include "penstock.name" . }}.{{ include "penstock.namespace" . }}.svc
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end }}

{{- define "penstock.chartLabels" -}}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
{{ include "penstock.chartLabels" . }}
{{- end }}

{{- define "penstock.image" -}}
{{- $image := .root.Values.image -}}
{{ $image.registry }}/{{ .service }}:{{ .values.tag | default $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "penstock.tokensSecret" -}}
{{ index .root.Values.credentials.tokens .service | default (include "penstock.name" .) }}
{{- end }}

{{- define "penstock.tlsSecret" -}}
{{- $own := ternary (printf "%s-tls" (include "penstock.name" .)) (include "penstock.name" .) .root.Values.credentials.certManager.enabled -}}
{{ index .root.Values.credentials.tls .service | default $own }}
{{- end }}

{{/* Whether a service's number of pods is the autoscaler's. */}}
{{- define "penstock.scaled" -}}
{{- $scaling := .root.Values.autoscaling -}}
{{- if and (ne $scaling.mode "none") (hasKey $scaling .service) }}{{ if (index $scaling .service).enabled }}true{{ end }}{{ end -}}
{{- end }}

{{/* An autoscaler's number is the cluster's own: of a workload that had one and has none, the API server makes 1. */}}
{{- define "penstock.replicas" -}}
{{- if not (include "penstock.scaled" .) }}
replicas: {{ .values.replicas }}
{{- else }}
{{- with lookup "apps/v1" "StatefulSet" (include "penstock.namespace" .) (include "penstock.name" .) }}
replicas: {{ int .spec.replicas }}
{{- end }}
{{- end }}
{{- end }}

{{/* The longest stop, and half a minute: a pod that drains is not killed. */}}
{{- define "penstock.grace" -}}
{{ add .values.drainSeconds .values.stopSeconds 30 }}
{{- end }}

{{- define "penstock.env" -}}
{{- $prefix := printf "PENSTOCK_%s" (upper .service) -}}
- {name: PENSTOCK_CONFIG, value: /run/penstock/config.toml}
- {name: PENSTOCK_CA_FILE, value: /run/penstock/ca.crt}
- {name: {{ $prefix }}_TLS_CERT, value: /run/penstock/tls.crt}
- {name: {{ $prefix }}_TLS_KEY, value: /run/penstock/tls.key}
- {name: {{ $prefix }}_METRICS_HOST, value: "0.0.0.0"}
- {name: {{ $prefix }}_METRICS_PORT, value: {{ .metrics | quote }}}
- {name: {{ $prefix }}_DRAIN_S, value: {{ .values.drainSeconds | toString | quote }}}
- {name: {{ $prefix }}_STOP_S, value: {{ .values.stopSeconds | toString | quote }}}
{{- if not (and (eq .service "sandbox") (eq .values.kind "DaemonSet")) }}
- name: {{ $prefix }}_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- end }}

{{/* Settings and further environment of the user. Secrets are refused: a pod's environment is shown to everyone who may read pods. */}}
{{- define "penstock.userEnv" -}}
{{- $service := .service -}}
{{- $own := list "name" "tls_cert" "tls_key" "metrics_host" "metrics_port" "drain_s" "stop_s" "sandbox_members" "interception_members"
      "driver_members" "services_ca" "ingress_host" "ingress_tls_cert" "ingress_tls_key" "ingress_address" "inference_address" "inference_ca"
      "model_dir" "engine" "engine_options" "default_backend" "allowed_upstreams" "upstream_ca" "docker_host" "docker_reach" "docker_runtime"
      "inference_members" "pool_members" "pool_ca" "kubernetes_namespace" "kubernetes_warm_pool" "kubernetes_allowed_warm_pools" "kubernetes_keys" -}}
{{- range $key, $value := .values.settings }}
{{- if has $key $own }}
{{- fail (printf "%s.settings.%s is set by the chart itself: see the other values of %s" $service $key $service) }}
{{- end }}
{{- if and (regexMatch "(^|_)(tokens?|keys?|passwords?|secrets?|credentials)$|^(namespaces|upstreams|inference)$" $key) (not (regexMatch "^max_[a-z_]*tokens$|^kubernetes_keys$" $key)) }}
{{- fail (printf "%s.settings.%s can hold a secret: write it into config.toml of the Secret %s, under [%s]" $service $key (include "penstock.tokensSecret" $) $service) }}
{{- end }}
- {name: PENSTOCK_{{ upper $service }}_{{ upper $key }}, value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}}
{{- end }}
{{- range .values.env }}
{{- /* A limit of tokens is none, and neither is the place of Google's file. */}}
{{- $secret := regexMatch "(?i)(tokens?|keys?|passwords?|secrets?|credentials)$|^PENSTOCK_[A-Z]+_(NAMESPACES|UPSTREAMS|INFERENCE)$" .name -}}
{{- if and $secret (not (regexMatch "(?i)(^|_)max_[a-z_]*tokens$|^GOOGLE_APPLICATION_CREDENTIALS$" .name)) (hasKey . "value") }}
{{- fail (printf "%s.env: %s can be a secret: use valueFrom.secretKeyRef" $service .name) }}
{{- end }}
- {{ toJson . }}
{{- end }}
{{- end }}

{{/* Ready: it takes new work. Alive: a process listens; one that drains is alive, and must not be killed for it. */}}
{{- define "penstock.probes" -}}
startupProbe:
  tcpSocket: {port: {{ .service }}}
  periodSeconds: 5
  failureThreshold: {{ div (add .values.startupSeconds 4) 5 }}
livenessProbe:
  tcpSocket: {port: {{ .service }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  exec: {command: [python3, -m, penstock_chassis.healthcheck, "localhost:{{ .port }}"]}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 2
{{- end }}

{{- define "penstock.ports" -}}
- {name: {{ .service }}, containerPort: {{ .port }}, protocol: TCP}
- {name: metrics, containerPort: {{ .metrics }}, protocol: TCP}
{{- end }}

{{- define "penstock.mounts" -}}
- {name: credentials, mountPath: /run/penstock, readOnly: true}
- {name: state, mountPath: /var/lib/penstock}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "penstock.volumes" -}}
- name: credentials
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ include "penstock.tokensSecret" . }}, items: [{key: config.toml, path: config.toml}]}
      - secret:
          name: {{ include "penstock.tlsSecret" . }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}

{{- define "penstock.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.claim" -}}
- metadata: {name: state}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .values.storage.className }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .values.storage.size }}}}
{{- end }}

{{/* No label with the chart's version: a pod restarts when its template changes, and kinds are upgraded one at a time. */}}
{{- define "penstock.podMetadata" -}}
labels:
  {{- include "penstock.selector" . | nindent 2 }}
{{- end }}

{{/* Of every pod. No link variables: the one of a Service named RELEASE-driver would be read as a setting of the service. */}}
{{- define "penstock.pod" -}}
serviceAccountName: {{ include "penstock.name" . }}
automountServiceAccountToken: {{ ternary true false (eq (include "penstock.asksCluster" .) "true") }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "penstock.grace" . }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- /* The sandboxes' pool is for what runs them: not for a service that claims them. */}}
{{- if not (include "penstock.asksCluster" .) }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.ordinaryUser" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "penstock.selector" . | nindent 8 }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The members of a service, for those who ask DNS: also those that are not ready. One that drains is still a member. */}}
{{- define "penstock.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "penstock.name" . }}
  namespace: {{ include "penstock.namespace" . }}
  labels: {{- include "penstock.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "penstock.selector" . | nindent 4 }}
  ports:
    - {name: {{ .service }}, port: {{ .port }}, targetPort: {{ .service }}, protocol: TCP}
    {{- if eq .service "interception" }}
    - {name: ingress, port: 7780, targetPort: ingress, protocol: TCP}
    {{- end }}
{{- end }}

{{- define "penstock.components" -}}
{{- $found := dict "driver" (dict "port" 7702 "metrics" 7712) "interception" (dict "port" 7703 "metrics" 7713) "sandbox" (dict "port" 7701 "metrics" 7711) -}}
{{- if .Values.inference.enabled }}{{ $_ := set $found "inference" (dict "port" 7704 "metrics" 7714) }}{{ end -}}
{{- toJson $found -}}
{{- end }}

{{/* Pods of one service, for a policy of the service `seen`. */}}
{{- define "penstock.peer" -}}
{{- $namespace := include "penstock.namespace" . -}}
podSelector:
  matchLabels: {{- include "penstock.selector" . | nindent 4 }}
{{- if ne $namespace (include "penstock.namespace" (dict "root" .root "service" .seen)) }}
namespaceSelector:
  matchLabels: {kubernetes.io/metadata.name: {{ $namespace }}}
{{- end }}
{{- end }}

{{/* Up at once, down by one pod at a time. */}}
{{- define "penstock.behavior" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: {{ min .scaleDownSeconds 1800 }}}]
{{- end }}
