package penstock

import (
	"bytes"
	"context"
	"crypto/sha256"

	chatv1 "penstock.example/penstock/gen/chat/v1"
	driverv1 "penstock.example/penstock/gen/driver/v1"
	trajectoryv1 "penstock.example/penstock/gen/trajectory/v1"
)

// What a trajectory describes and does not carry: rows of tensors, and files of images.

// AddTensors fetches the rows of all tensors that a trajectory's calls and samples describe, such as routed experts: Data of each.
//
// Errors: ErrDataLoss, TENSOR_DAMAGED: what came is not what its digest says.
func (r *Rollout) AddTensors(ctx context.Context, trajectory *trajectoryv1.Trajectory) error {
	for _, one := range trajectory.GetCalls() {
		for _, tensor := range one.GetCompletion().GetTensors() {
			holder := &driverv1.GetTensorRequest_CallId{CallId: one.GetCallId()}
			if err := r.rows(ctx, tensor, &driverv1.GetTensorRequest{Holder: holder}); err != nil {
				return err
			}
		}
	}
	for _, sample := range trajectory.GetSamples() {
		for _, tensor := range sample.GetTensors() {
			holder := &driverv1.GetTensorRequest_SampleId{SampleId: sample.GetSampleId()}
			if err := r.rows(ctx, tensor, &driverv1.GetTensorRequest{Holder: holder}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Rollout) rows(ctx context.Context, tensor *chatv1.TokenTensor, request *driverv1.GetTensorRequest) error {
	request.RolloutId, request.Name, request.Start = r.ID, tensor.GetName(), tensor.GetStart()
	pieces, err := collect(ctx, r.at.service(), r.at.stub().GetTensor, request, resultTimeout)
	if err != nil {
		return err
	}
	var data []byte
	for _, piece := range pieces {
		data = append(data, piece.GetTensor().GetData()...)
	}
	if digest := sha256.Sum256(data); !bytes.Equal(digest[:], tensor.GetSha256()) {
		return &Error{Kind: ErrDataLoss, Reason: "TENSOR_DAMAGED", Message: "A tensor of " + r.ID + " arrived damaged"}
	}
	tensor.Data = data
	return nil
}

// Image is the file of one image of the ended rollout's prompts, by Media.Sha256.
//
// Errors: ErrNotFound, MEDIA_UNKNOWN; ErrFailedPrecondition, ROLLOUT_RUNNING, TRAJECTORY_ABSENT; ErrDataLoss, IMAGE_DAMAGED: what
// came is not what the digest says.
func (r *Rollout) Image(ctx context.Context, digest []byte) ([]byte, error) {
	request := &driverv1.GetMediaRequest{RolloutId: r.ID, Sha256: digest}
	pieces, err := collect(ctx, r.at.service(), r.at.stub().GetMedia, request, resultTimeout)
	if err != nil {
		return nil, err
	}
	var data []byte
	for _, piece := range pieces {
		data = append(data, piece.GetChunk()...)
	}
	if found := sha256.Sum256(data); !bytes.Equal(found[:], digest) {
		return nil, &Error{Kind: ErrDataLoss, Reason: "IMAGE_DAMAGED", Message: "An image of " + r.ID + " arrived damaged"}
	}
	return data, nil
}

// AddImages fetches the files of all images that a trajectory's calls and samples describe, each once: Data of each.
//
// Errors: those of Image.
func (r *Rollout) AddImages(ctx context.Context, trajectory *trajectoryv1.Trajectory) error {
	var all []*chatv1.Media
	for _, one := range trajectory.GetCalls() {
		all = append(all, one.GetMedia()...)
	}
	for _, sample := range trajectory.GetSamples() {
		all = append(all, sample.GetMedia()...)
	}
	files := map[string][]byte{}
	for _, media := range all {
		file, known := files[string(media.GetSha256())]
		if !known {
			var err error
			if file, err = r.Image(ctx, media.GetSha256()); err != nil {
				return err
			}
			files[string(media.GetSha256())] = file
		}
		media.Data = file
	}
	return nil
}
