//go:build tools

// Package tools names the programs that the testbed builds, so that go.mod holds what they need.
package tools

import _ "helm.sh/helm/v3/cmd/helm"
