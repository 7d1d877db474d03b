// Command etcd is the etcd server alone: its own main lives in a module that cannot be built from outside.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
