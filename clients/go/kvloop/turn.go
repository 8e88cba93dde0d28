package kvloop

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvloop/clients/go/kvloopv1alpha1"
)

// Turn is one turn of a conversation.
type Turn struct {
	// Prompt is the whole history as token ids.
	Prompt []uint32
	// Conversation under which KV is found and kept; without an ID, neither.
	Conversation Conversation
	// ParentConversationID is where to look when the conversation holds nothing yet.
	ParentConversationID string
	// Sampling says how to sample; nil for the defaults.
	Sampling *pb.SamplingParams
	// Retention says what is kept; nil for the defaults.
	Retention *pb.Retention
	// Recompute forbids reuse.
	Recompute bool
	// RequestID is minted when empty.
	RequestID string
}

// Event is a run of new tokens or, once and last, the summary.
type Event struct {
	TokenIDs []uint32
	Text     string
	Logprobs []*pb.PositionLogprobs
	Summary  *pb.Summary
}

// Answer is a whole answer.
type Answer struct {
	TokenIDs []uint32
	Text     string
	Summary  *pb.Summary
}

// Stream is an answer under way. One goroutine reads.
type Stream struct {
	answer pb.RouterService_GenerateClient
	cancel context.CancelFunc
	ended  bool
}

// Generate serves one turn. Without a deadline in ctx it takes ten minutes at most. Failures come from Recv.
func (c *Client) Generate(ctx context.Context, turn Turn) (*Stream, error) {
	request := &pb.GenerateRequest{
		RequestId:            turn.RequestID,
		ConversationId:       turn.Conversation.ID,
		ParentConversationId: turn.ParentConversationID,
		Model:                turn.Conversation.Model,
		Adapter:              turn.Conversation.Adapter,
		CacheSalt:            turn.Conversation.CacheSalt,
		PromptTokenIds:       Pack(turn.Prompt),
		Sampling:             turn.Sampling,
		Retention:            turn.Retention,
	}
	if turn.Recompute {
		request.ReusePolicy = pb.ReusePolicy_REUSE_POLICY_FORBID
	}
	if request.RequestId == "" {
		// Of the same id for all tries: of two that meet, the later one takes over.
		var id [16]byte
		if _, err := rand.Read(id[:]); err != nil {
			return nil, err
		}
		request.RequestId = hex.EncodeToString(id[:])
	}
	ctx, cancel := withDefaultTimeout(ctx, turnTimeout)
	answer, err := c.router.Generate(ctx, request)
	if err != nil {
		cancel()
		return nil, failed(err)
	}
	return &Stream{answer: answer, cancel: cancel}, nil
}

// Recv returns the next event, and io.EOF after the summary. Once tokens have come, a failure is final: to go on,
// send the prompt with the tokens so far.
func (s *Stream) Recv() (Event, error) {
	response, err := s.answer.Recv()
	if err != nil {
		s.cancel()
		if errors.Is(err, io.EOF) {
			if s.ended {
				return Event{}, io.EOF
			}
			err = status.Error(codes.Unavailable, "the stream ended without a summary")
		}
		return Event{}, failed(err)
	}
	if summary := response.GetSummary(); summary != nil {
		s.ended = true
		return Event{Summary: summary}, nil
	}
	chunk := response.GetChunk()
	return Event{TokenIDs: Unpack(chunk.GetTokenIds()), Text: chunk.GetText(), Logprobs: chunk.GetLogprobs()}, nil
}

// Close cancels what is left of the turn. Not needed after an error of Recv's, io.EOF included.
func (s *Stream) Close() { s.cancel() }

// Collect reads the rest of the answer; with an error, what came before it.
func (s *Stream) Collect() (Answer, error) {
	var answer Answer
	for {
		event, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return answer, nil
		}
		if err != nil {
			return answer, err
		}
		answer.TokenIDs = append(answer.TokenIDs, event.TokenIDs...)
		answer.Text += event.Text
		if event.Summary != nil {
			answer.Summary = event.Summary
		}
	}
}

// Complete serves one turn and waits for its end.
func (c *Client) Complete(ctx context.Context, turn Turn) (Answer, error) {
	stream, err := c.Generate(ctx, turn)
	if err != nil {
		return Answer{}, err
	}
	return stream.Collect()
}

// Pack returns token ids as they travel: little-endian uint32.
func Pack(ids []uint32) []byte {
	packed := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(packed[4*i:], id)
	}
	return packed
}

// Unpack returns the token ids of a packed run.
func Unpack(packed []byte) []uint32 {
	ids := make([]uint32, len(packed)/4)
	for i := range ids {
		ids[i] = binary.LittleEndian.Uint32(packed[4*i:])
	}
	return ids
}
