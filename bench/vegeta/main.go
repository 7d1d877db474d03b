// Sends 1,000 requests per second for 10 s with Vegeta's library to a port on this machine.
package main

import (
	"fmt"
	"os"
	"time"

	vegeta "github.com/tsenart/vegeta/v12/lib"
)

func main() {
	target := vegeta.NewStaticTargeter(vegeta.Target{Method: "GET", URL: "http://127.0.0.1:" + os.Args[1] + "/"})
	var metrics vegeta.Metrics
	for result := range vegeta.NewAttacker().Attack(target, vegeta.Rate{Freq: 1000, Per: time.Second}, 10*time.Second, "pacing") {
		metrics.Add(result)
	}
	metrics.Close()
	fmt.Printf("%d requests, success %.1f%%, P50 %s, P99 %s\n", metrics.Requests, metrics.Success*100, metrics.Latencies.P50, metrics.Latencies.P99)
}
