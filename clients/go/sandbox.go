package penstock

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

const fileChunkBytes = 256 << 10

// Sandbox is a handle of one sandbox. It lives until Delete, or until its lease ends.
//
// Errors, of all its methods: ErrNotFound, SANDBOX_UNKNOWN; ErrFailedPrecondition, SANDBOX_LOST, SANDBOX_PAUSED.
type Sandbox struct {
	// ID is the sandbox's id.
	ID string
	// Message is the sandbox as it was when the handle was made: backend, home, working directory.
	Message *sandboxv1.Sandbox

	sandboxes *Sandboxes
	home      node
	data      *service
	processes sandboxv1.ProcessServiceClient
	files     sandboxv1.FileServiceClient
}

// Shell is a command for the sandbox's shell.
func Shell(line string) *sandboxv1.Command {
	return &sandboxv1.Command{Command: &sandboxv1.Command_Shell{Shell: line}}
}

// Argv is a command by its argument vector.
func Argv(args ...string) *sandboxv1.Command {
	return &sandboxv1.Command{Command: &sandboxv1.Command_Argv{Argv: &sandboxv1.Argv{Args: args}}}
}

// Renew extends the lease to this long from now; it returns the end that was granted, which the operator's max_lifetime_s
// may have made sooner.
func (s *Sandbox) Renew(ctx context.Context, lease time.Duration) (time.Time, error) {
	request := &sandboxv1.RenewLeaseRequest{SandboxId: s.ID, Lease: durationpb.New(lease)}
	answer, err := call(ctx, s.home.service, s.home.stub.RenewLease, request, callTimeout, true)
	if err != nil {
		return time.Time{}, err
	}
	return answer.GetExpireTime().AsTime(), nil
}

// NarrowNetwork restricts what it may reach; nil = nothing. Connections that are no longer allowed are cut.
//
// Errors: ErrFailedPrecondition, POLICY_WIDER: a network can only be narrowed; CAPABILITY_MISSING.
func (s *Sandbox) NarrowNetwork(ctx context.Context, network *sandboxv1.NetworkPolicy) error {
	if network == nil {
		network = &sandboxv1.NetworkPolicy{Policy: &sandboxv1.NetworkPolicy_None{None: &sandboxv1.NoNetwork{}}}
	}
	request := &sandboxv1.SetNetworkPolicyRequest{SandboxId: s.ID, Network: network}
	_, err := call(ctx, s.home.service, s.home.stub.SetNetworkPolicy, request, callTimeout, true)
	return err
}

// Stats is what it uses now and used at most; an unset figure is unknown to its backend.
func (s *Sandbox) Stats(ctx context.Context) (*sandboxv1.GetStatsResponse, error) {
	request := &sandboxv1.GetStatsRequest{SandboxId: s.ID}
	return call(ctx, s.home.service, s.home.stub.GetStats, request, callTimeout, true)
}

// Pause freezes every process; it returns when all are frozen.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING; ErrUnavailable, PAUSE_FAILED.
func (s *Sandbox) Pause(ctx context.Context) error {
	request := &sandboxv1.PauseSandboxRequest{SandboxId: s.ID}
	_, err := call(ctx, s.home.service, s.home.stub.PauseSandbox, request, callTimeout, true)
	return err
}

// Resume thaws it.
func (s *Sandbox) Resume(ctx context.Context) error {
	request := &sandboxv1.ResumeSandboxRequest{SandboxId: s.ID}
	_, err := call(ctx, s.home.service, s.home.stub.ResumeSandbox, request, callTimeout, true)
	return err
}

// Fork makes `count` sandboxes with its files of now, without its processes and /tmp. See Sandboxes.Fork.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING: its backend cannot fork a live sandbox.
func (s *Sandbox) Fork(ctx context.Context, count int, child *sandboxv1.SandboxSpec) iter.Seq2[*Fork, error] {
	source := &sandboxv1.ForkSandboxesRequest_SandboxId{SandboxId: s.ID}
	return s.sandboxes.forks(ctx, s.home, &sandboxv1.ForkSandboxesRequest{Source: source, Count: int32(count), Spec: child})
}

// Diff is the files that differ from the base.
type Diff struct {
	// Tar is a POSIX pax archive of those that are new or changed; every pipe, socket or device is a pipe in it.
	Tar []byte
	// DeletedPaths are absolute; their bytes are as the sandbox has them.
	DeletedPaths []string
}

// Diff reads what differs from its base. The tar has at most maxBytes; 0 = 1 GiB.
//
// Errors: ErrFailedPrecondition, CAPABILITY_MISSING, FILE_REPLACED; ErrResourceExhausted, TREE_TOO_LARGE; ErrDataLoss,
// DIGEST_MISMATCH.
func (s *Sandbox) Diff(ctx context.Context, maxBytes int64) (*Diff, error) {
	request := &sandboxv1.DiffSandboxRequest{SandboxId: s.ID, MaxBytes: positive(maxBytes)}
	parts, err := collect(ctx, s.home.service, s.home.stub.DiffSandbox, request, noTimeout)
	if err != nil {
		return nil, err
	}
	diff, announced := &Diff{}, []byte(nil)
	for _, part := range parts {
		diff.Tar = append(diff.Tar, part.GetTarChunk()...)
		if end := part.GetEnd(); end != nil {
			announced, diff.DeletedPaths = end.GetSha256(), end.GetDeletedPaths()
			for _, path := range end.GetRawDeletedPaths() {
				diff.DeletedPaths = append(diff.DeletedPaths, string(path))
			}
		}
	}
	return diff, undamaged("the diff", diff.Tar, announced)
}

// Delete kills everything in it and removes it. It may be repeated.
func (s *Sandbox) Delete(ctx context.Context) error {
	request := &sandboxv1.DeleteSandboxRequest{SandboxId: s.ID}
	_, err := call(ctx, s.home.service, s.home.stub.DeleteSandbox, request, deleteTimeout, true)
	return err
}

// ReadFile is a file's content.
//
// Errors: ErrNotFound, FILE_NOT_FOUND; ErrDataLoss, DIGEST_MISMATCH: it was damaged on the way.
func (s *Sandbox) ReadFile(ctx context.Context, path string) ([]byte, error) {
	request := &sandboxv1.ReadFileRequest{SandboxId: s.ID, Path: path}
	parts, err := collect(ctx, s.data, s.files.ReadFile, request, noTimeout)
	if err != nil {
		return nil, err
	}
	content, announced := []byte{}, []byte(nil)
	for _, part := range parts {
		content = append(content, part.GetChunk()...)
		if part.GetSha256() != nil {
			announced = part.GetSha256()
		}
	}
	return content, undamaged(path, content, announced)
}

// WriteFile writes a whole file at once and makes its parent directories. The mode is permission bits; 0 = 0644.
func (s *Sandbox) WriteFile(ctx context.Context, path string, content []byte, mode uint32) error {
	type request = sandboxv1.WriteFileRequest
	start := &sandboxv1.WriteFileRequest_WriteFileStart{SandboxId: s.ID, Path: path}
	if mode != 0 {
		start.Mode = &mode
	}
	digest := sha256.Sum256(content)
	frames := func(yield func(*request) bool) {
		whole := yield(&request{Frame: &sandboxv1.WriteFileRequest_Start{Start: start}})
		for chunk := range chunked(content) {
			whole = whole && yield(&request{Frame: &sandboxv1.WriteFileRequest_Chunk{Chunk: chunk}})
		}
		if whole {
			end := &sandboxv1.WriteFileRequest_WriteFileEnd{Sha256: digest[:]}
			yield(&request{Frame: &sandboxv1.WriteFileRequest_End{End: end}})
		}
	}
	_, err := push(ctx, s.data, s.files.WriteFile, frames, noTimeout)
	return err
}

// ReadTree is a directory as a tar (POSIX pax) of at most maxBytes; 0 = 1 GiB.
//
// Errors: ErrResourceExhausted, TREE_TOO_LARGE; ErrFailedPrecondition, FILE_REPLACED; ErrDataLoss, DIGEST_MISMATCH.
func (s *Sandbox) ReadTree(ctx context.Context, path string, maxBytes int64) ([]byte, error) {
	request := &sandboxv1.ReadTreeRequest{SandboxId: s.ID, Path: path, MaxBytes: positive(maxBytes)}
	parts, err := collect(ctx, s.data, s.files.ReadTree, request, noTimeout)
	if err != nil {
		return nil, err
	}
	tar, announced := []byte{}, []byte(nil)
	for _, part := range parts {
		tar = append(tar, part.GetTarChunk()...)
		if part.GetSha256() != nil {
			announced = part.GetSha256()
		}
	}
	return tar, undamaged(path, tar, announced)
}

// WriteTree unpacks a tar into a directory, which is made where it is missing.
//
// Errors: ErrInvalidArgument, TAR_MEMBER_REFUSED; ErrResourceExhausted, TREE_TOO_LARGE.
func (s *Sandbox) WriteTree(ctx context.Context, path string, tar []byte) error {
	type request = sandboxv1.WriteTreeRequest
	start := &sandboxv1.WriteTreeRequest_WriteTreeStart{SandboxId: s.ID, Path: path}
	digest := sha256.Sum256(tar)
	frames := func(yield func(*request) bool) {
		whole := yield(&request{Frame: &sandboxv1.WriteTreeRequest_Start{Start: start}})
		for chunk := range chunked(tar) {
			whole = whole && yield(&request{Frame: &sandboxv1.WriteTreeRequest_TarChunk{TarChunk: chunk}})
		}
		if whole {
			end := &sandboxv1.WriteTreeRequest_WriteTreeEnd{Sha256: digest[:]}
			yield(&request{Frame: &sandboxv1.WriteTreeRequest_End{End: end}})
		}
	}
	_, err := push(ctx, s.data, s.files.WriteTree, frames, noTimeout)
	return err
}

// Files yields a directory's entries, sorted by name. An error is the last thing that it yields.
func (s *Sandbox) Files(ctx context.Context, path string) iter.Seq2[*sandboxv1.FileInfo, error] {
	return paged(func(token string) ([]*sandboxv1.FileInfo, string, error) {
		request := &sandboxv1.ListRequest{SandboxId: s.ID, Path: path, PageToken: token}
		answer, err := call(ctx, s.data, s.files.List, request, callTimeout, true)
		return answer.GetEntries(), answer.GetNextPageToken(), err
	})
}

// Stat is the metadata of a file; symbolic links are not followed.
//
// Errors: ErrNotFound, FILE_NOT_FOUND.
func (s *Sandbox) Stat(ctx context.Context, path string) (*sandboxv1.FileInfo, error) {
	request := &sandboxv1.StatRequest{SandboxId: s.ID, Path: path}
	answer, err := call(ctx, s.data, s.files.Stat, request, callTimeout, true)
	return answer.GetInfo(), err
}

// MakeDirectory makes a directory and its parents; one that exists is a success.
func (s *Sandbox) MakeDirectory(ctx context.Context, path string) error {
	request := &sandboxv1.MakeDirectoryRequest{SandboxId: s.ID, Path: path}
	_, err := call(ctx, s.data, s.files.MakeDirectory, request, callTimeout, true)
	return err
}

// Remove removes a file or, recursively, a directory. A path that does not exist is a success.
//
// Errors: ErrFailedPrecondition, DIRECTORY_NOT_EMPTY.
func (s *Sandbox) Remove(ctx context.Context, path string, recursive bool) error {
	request := &sandboxv1.RemoveRequest{SandboxId: s.ID, Path: path, Recursive: recursive}
	_, err := call(ctx, s.data, s.files.Remove, request, callTimeout, true)
	return err
}

func chunked(content []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(content) > 0 {
			size := min(len(content), fileChunkBytes)
			if !yield(content[:size]) {
				return
			}
			content = content[size:]
		}
	}
}

func undamaged(what string, content, announced []byte) error {
	if found := sha256.Sum256(content); !bytes.Equal(found[:], announced) {
		return &Error{
			Kind: ErrDataLoss, Reason: "DIGEST_MISMATCH", Message: fmt.Sprintf("%s arrived damaged: its digest differs", what),
		}
	}
	return nil
}

func positive(number int64) *int64 {
	if number == 0 {
		return nil
	}
	return &number
}
