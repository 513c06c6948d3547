import Foundation

/// An error as the server words it.
public struct APIError: Error, Sendable, Equatable, CustomStringConvertible {
    /// The HTTP status; 200 where the error came after the answer had begun.
    public var status: Int
    /// The kind of error, such as `invalid_request_error`.
    public var type: String?
    /// A name for programs, such as `model_not_found`.
    public var code: String?
    /// The field of the request that the error is about.
    public var param: String?
    /// The sentence for people.
    public var message: String
    /// What the server's log calls this request.
    public var requestID: String?
    /// After how many seconds another attempt makes sense, where the server says so.
    public var retryAfter: Int?

    public init(
        status: Int, type: String? = nil, code: String? = nil, param: String? = nil, message: String, requestID: String? = nil,
        retryAfter: Int? = nil
    ) {
        (self.status, self.type, self.code, self.param) = (status, type, code, param)
        (self.message, self.requestID, self.retryAfter) = (message, requestID, retryAfter)
    }

    /// Whether the prompt and its answer are longer than the model's context, or than the server has room for.
    public var isTooLong: Bool { code == "context_length_exceeded" }

    public var description: String {
        let place = param.map { " (\($0))" } ?? ""
        return "\(message)\(place) [\(status)\(type.map { " \($0)" } ?? "")]"
    }
}

extension APIError {
    /// The error that a response with a status of failure carries, whatever its body looks like.
    init(head: ResponseHead, body: [UInt8]) {
        if let parsed = try? JSONDecoder().decode(ErrorBody.self, from: Data(body)) {
            self.init(status: head.status, body: parsed)
        } else {
            let text = String(decoding: body.prefix(500), as: UTF8.self).trimmingCharacters(in: .whitespacesAndNewlines)
            self.init(status: head.status, message: text.isEmpty ? (head.reason.isEmpty ? "no reason given" : head.reason) : text)
        }
        requestID = head.fields["x-request-id"]
        retryAfter = head.fields["retry-after"].flatMap { Int($0) }
    }

    /// The error that an event of a stream carries.
    init(status: Int, body: ErrorBody) {
        self.init(status: status, type: body.type, code: body.code, param: body.param, message: body.message)
    }
}

/// `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`, and the shapes that other servers use instead.
struct ErrorBody: Decodable {
    var message: String
    var type: String?
    var code: String?
    var param: String?

    private enum Outer: String, CodingKey { case error, detail, message }
    private enum Inner: String, CodingKey { case message, type, code, param }

    init(from decoder: any Decoder) throws {
        let outer = try decoder.container(keyedBy: Outer.self)
        if let inner = try? outer.nestedContainer(keyedBy: Inner.self, forKey: .error) {
            message = (try? inner.decode(String.self, forKey: .message)) ?? "no reason given"
            type = try? inner.decode(String.self, forKey: .type)
            param = try? inner.decode(String.self, forKey: .param)
            code = (try? inner.decode(String.self, forKey: .code)) ?? (try? inner.decode(Int.self, forKey: .code)).map { String($0) }
            return
        }
        for key in [Outer.error, .detail, .message] {
            if let value = try? outer.decode(JSONValue.self, forKey: key), value != .null {
                message = value.string ?? value.description
                return
            }
        }
        throw DecodingError.keyNotFound(Outer.error, .init(codingPath: [], debugDescription: "no error"))
    }
}
