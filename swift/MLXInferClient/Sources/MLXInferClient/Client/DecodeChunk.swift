import Foundation

/// What an event's data holds: a piece of an answer, or the server's error.
protocol AnswerChunk: Decodable {
    associatedtype Choice: AnswerChoice
    var id: String? { get }
    var model: String? { get }
    var choices: [Choice]? { get }
    var usage: Usage? { get }
    var error: JSONValue? { get }
}

/// The part of a chunk that belongs to one answer.
protocol AnswerChoice: Decodable {
    var index: Int? { get }
    var text: String? { get }
    var reasoning: String? { get }
    var calls: [ToolCallDelta] { get }
    var tokens: [TokenLogprob]? { get }
    var finish: FinishReason? { get }
}

extension AnswerChoice {
    var reasoning: String? { nil }
    var calls: [ToolCallDelta] { [] }
}

/// The chunk that an event's data holds.
///
/// - Throws: ``MLXInferError/api(_:)`` where the event is an error of the server, ``HTTPFailure`` where it cannot be read.
func decodeChunk<Chunk: AnswerChunk>(_ type: Chunk.Type, _ data: [UInt8]) throws -> Chunk {
    do {
        let chunk = try JSONDecoder().decode(type, from: Data(data))
        guard let error = chunk.error, error != .null else { return chunk }
        throw MLXInferError.api(APIError(status: 200, body: try JSONDecoder().decode(ErrorBody.self, from: Data(data))))
    } catch let error as DecodingError {
        throw HTTPFailure.malformed("an event that cannot be read: \(error.reason)")
    }
}
