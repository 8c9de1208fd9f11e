// Channel runs commands inside the testbed's virtual machine, asked for over a virtio-serial port.
//
// It is no part of Hostprep: it is how tests get in. In Go, since the node's image has no Python.
// A frame is two big-endian lengths of four bytes, a JSON head and a payload; one request at a time.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const portName = "hostprep.channel"

type request struct {
	ID       int      `json:"id"`
	Argv     []string `json:"argv"`
	TimeoutS float64  `json:"timeout_s"`
}

type answer struct {
	ID       int     `json:"id,omitempty"`
	Hello    string  `json:"hello,omitempty"`
	UptimeS  string  `json:"uptime_s,omitempty"`
	ExitCode int     `json:"exit_code"`
	Seconds  float64 `json:"seconds"`
	Error    string  `json:"error,omitempty"`
}

// patient retries reads while no host side is connected: the port then says end of file.
type patient struct{ port *os.File }

func (p patient) Read(buffer []byte) (int, error) {
	for {
		n, err := p.port.Read(buffer)
		if n > 0 {
			return n, nil
		}
		if err != nil && err != io.EOF {
			return 0, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func main() {
	port := open()
	boot, uptime := read("/proc/sys/kernel/random/boot_id"), strings.Fields(read("/proc/uptime"))[0]
	send(port, answer{Hello: boot, UptimeS: uptime}, nil)
	for {
		var lengths [8]byte
		must(io.ReadFull(patient{port}, lengths[:]))
		head := make([]byte, binary.BigEndian.Uint32(lengths[:4]))
		payload := make([]byte, binary.BigEndian.Uint32(lengths[4:]))
		must(io.ReadFull(patient{port}, head))
		must(io.ReadFull(patient{port}, payload))
		var asked request
		if err := json.Unmarshal(head, &asked); err != nil {
			panic(err)
		}
		said, output := run(asked, payload)
		send(port, said, output)
	}
}

func run(asked request, input []byte) (answer, []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(asked.TimeoutS*float64(time.Second)))
	defer cancel()
	var output bytes.Buffer
	command := exec.CommandContext(ctx, asked.Argv[0], asked.Argv[1:]...)
	command.Stdin, command.Stdout, command.Stderr = bytes.NewReader(input), &output, &output
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// The whole session: a shell's children would keep the pipe, and us, waiting.
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	command.WaitDelay = time.Second
	begin := time.Now()
	err := command.Run()
	said := answer{ID: asked.ID, Seconds: time.Since(begin).Seconds()}
	switch {
	case ctx.Err() != nil:
		said.ExitCode = 124
	case command.ProcessState != nil:
		said.ExitCode = command.ProcessState.ExitCode()
	default:
		said.ExitCode, said.Error = 127, err.Error()
	}
	return said, output.Bytes()
}

func open() *os.File {
	for {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, name := range names {
			if read(name) == portName {
				device := "/dev/" + filepath.Base(filepath.Dir(name))
				// Blocking, without Go's poller: a virtio port reports a hang-up while nobody is there.
				fd, err := syscall.Open(device, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
				if err != nil {
					panic(err)
				}
				return os.NewFile(uintptr(fd), device)
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func send(port *os.File, said answer, output []byte) {
	head, err := json.Marshal(said)
	if err != nil {
		panic(err)
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(len(head)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(output)))
	frame = append(append(frame, head...), output...)
	if _, err := port.Write(frame); err != nil {
		panic(err)
	}
}

func read(path string) string {
	text, _ := os.ReadFile(path)
	return strings.TrimSpace(string(text))
}

func must(_ int, err error) {
	if err != nil {
		panic(err)
	}
}
