import Foundation

@testable import MLXInferClient

/// Answers of a server, as the bytes it would send.
enum Transcript {
    /// An answer that is streamed: each event in a chunk of its own.
    static func stream(_ events: [String], type: String = "text/event-stream; charset=utf-8", end: Bool = true) -> [UInt8] {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: \(type)\r\nx-request-id: r1\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head.bytes + events.flatMap { chunk($0) } + (end ? "0\r\n\r\n".bytes : [])
    }

    static func chunk(_ text: String) -> [UInt8] {
        (String(text.utf8.count, radix: 16) + "\r\n" + text + "\r\n").bytes
    }

    static func json(_ body: String, status: String = "200 OK", fields: String = "") -> [UInt8] {
        "HTTP/1.1 \(status)\r\ncontent-type: application/json\r\ncontent-length: \(body.utf8.count)\r\n\(fields)\r\n\(body)".bytes
    }

    static let models = json(#"{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"x","max_model_len":64}]}"#)

    static let done = "data: [DONE]\n\n"

    /// A chunk of a chat with one choice.
    static func delta(_ delta: String, finish: String = "null", more: String = "") -> String {
        """
        data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":\(delta),\
        "logprobs":null,"finish_reason":\(finish)}]\(more)}\n\n
        """
    }

    static let usage = """
        data: {"id":"chatcmpl-1","model":"tiny","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,\
        "prompt_tokens_details":{"cached_tokens":3}}}\n\n
        """

    /// A short chat, whole.
    static let chatEvents = [
        ": keep-alive\n\n", delta(#"{"role":"assistant","content":"","refusal":null}"#), delta(#"{"content":"Grü"}"#),
        delta(#"{"content":"ße 🙂"}"#), delta("{}", finish: #""stop""#), usage, done,
    ]

    static let chat = stream(chatEvents)

    /// What it means.
    static let chatMeaning: [ChatEvent] = [
        .started(id: "chatcmpl-1", model: "tiny"), .text("Grü"), .text("ße 🙂"), .finished(.stop),
        .usage(Usage(promptTokens: 5, completionTokens: 2, cachedTokens: 3)),
    ]

    /// An answer that calls tools: names and arguments.
    static func calls(_ calls: (String, String)...) -> FaultServer.Step {
        let deltas = calls.enumerated().map { index, call in
            let arguments = JSONValue.string(call.1).description
            let function = #"{"name":"\#(call.0)","arguments":\#(arguments)}"#
            return delta(#"{"tool_calls":[{"index":\#(index),"id":"c\#(index)","type":"function","function":\#(function)}]}"#)
        }
        return .send(stream(deltas + [delta("{}", finish: #""tool_calls""#), usage, done]))
    }
}
