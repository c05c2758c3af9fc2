package penstock

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc"
)

// Files, trees and input may be large, so that the caller's context alone bounds how long they take (R38).
func TestTransfersOfFilesHaveNoDeadlineButTheCallers(t *testing.T) {
	var mu sync.Mutex
	bound := map[string]bool{} // by method, whether it has a deadline
	note := func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		mu.Lock()
		_, bound[info.FullMethod] = stream.Context().Deadline()
		mu.Unlock()
		return handler(service, stream)
	}
	sandbox := (&inputs{}).sandbox(t, grpc.StreamInterceptor(note))
	process, err := sandbox.Start(bounded(t), Argv("cat"), WithOpenStdin())
	if err != nil {
		t.Fatal(err)
	}
	for _, expected := range []bool{false, true} {
		ctx := context.Background()
		if expected {
			ctx = bounded(t)
		}
		// The service has no files: what it answers says nothing here.
		_, _ = sandbox.Diff(ctx, 0)
		_, _ = sandbox.ReadFile(ctx, "/f")
		_ = sandbox.WriteFile(ctx, "/f", []byte("content"), 0)
		_, _ = sandbox.ReadTree(ctx, "/d", 0)
		_ = sandbox.WriteTree(ctx, "/d", []byte("content"))
		_ = process.Write(ctx, []byte("content"), false)
		mu.Lock()
		for method, has := range bound {
			if has != expected {
				t.Errorf("%s has a deadline: %t", method, has)
			}
		}
		if len(bound) != 6 {
			t.Errorf("asked were %v", bound)
		}
		mu.Unlock()
	}
}
