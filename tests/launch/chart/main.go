// Renders a chart's templates with Go's own text/template and the few of Helm's functions they use, for machines without helm.
// Usage: go run main.go CHART RELEASE NAMESPACE VALUES.json
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

func main() {
	chart, release, namespace := os.Args[1], os.Args[2], os.Args[3]
	content, err := os.ReadFile(os.Args[4])
	check(err)
	var values map[string]any
	check(json.Unmarshal(content, &values))
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(template.FuncMap{
		"toYaml":  func(value any) string { text, err := json.Marshal(value); check(err); return string(text) },
		"nindent": func(by int, text string) string { return "\n" + indent(by, text) },
		"quote":   func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"replace": func(from, to, text string) string { return strings.ReplaceAll(text, from, to) },
		"contains": func(part, text string) bool { return strings.Contains(text, part) },
		"upper":   strings.ToUpper,
		"list":    func(items ...any) []any { return items },
		"default": func(fallback any, given ...any) any {
			if len(given) == 0 || given[0] == nil || given[0] == "" || given[0] == false {
				return fallback
			}
			return given[0]
		},
		"include": func(name string, data any) (string, error) {
			var text strings.Builder
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
	})
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	sort.Strings(files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		check(err)
		template.Must(all.New(filepath.Base(file)).Parse(string(text)))
	}
	data := map[string]any{
		"Values":  values,
		"Release": map[string]any{"Name": release, "Namespace": namespace, "Service": "Helm"},
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".yaml") {
			fmt.Println("---")
			check(all.ExecuteTemplate(os.Stdout, filepath.Base(file), data))
		}
	}
}

func indent(by int, text string) string {
	space := strings.Repeat(" ", by)
	return space + strings.ReplaceAll(text, "\n", "\n"+space)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
